"""Whole models: seconds per epoch, seconds to an accuracy, and accuracies."""
