"""Makes ``python -m lightning_gnn`` equivalent to ``lgnn``."""

from lightning_gnn.cli.main import main

if __name__ == "__main__":
    main()
