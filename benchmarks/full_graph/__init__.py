"""Full-graph training epochs, and their peers."""
