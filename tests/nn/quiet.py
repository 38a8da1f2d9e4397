"""A silent CPU trainer without output files."""

import pytorch_lightning as pl


def trainer(folder=None, **options):
    quiet = dict.fromkeys(("logger", "enable_checkpointing", "enable_progress_bar", "enable_model_summary"), False)
    return pl.Trainer(**{"default_root_dir": folder, "accelerator": "cpu", "max_epochs": 1, **quiet, **options})
