"""``lgnn cache`` is a command."""

import pytest

from lightning_gnn.cli import main as cli
from lightning_gnn.runtime.store import keep


def test_it_is_a_command_of_lgnn(tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("LIGHTNING_GNN_CACHE", str(tmp_path))
    keep("plans", "0" * 32, lambda folder: (folder / "plan.yaml").write_text("x"), title="plan for this machine")
    for arguments, text in ([[], "1 entry,"], [["--verify"], "1 whole"], [["--clear"], "plans: 1 entry removed"]):
        monkeypatch.setattr("sys.argv", ["lgnn", "cache", *arguments])
        with pytest.raises(SystemExit) as caught:
            cli.main()
        assert caught.value.code == 0
        assert text in capsys.readouterr().out
