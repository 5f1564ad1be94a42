"""Progress with the time left: a bar on a terminal, lines elsewhere."""

import io
from types import SimpleNamespace

import pytest

from swarm.observability import progress as module
from swarm.observability.progress import LINE_INTERVAL_S, _Lines, progress, tracked
from swarm.policy.base_folder import BUNDLED_FOLDER, _counting
from swarm.policy.lineage import hash_weights


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.fixture
def terminal(monkeypatch: pytest.MonkeyPatch) -> Terminal:
    screen = Terminal()
    monkeypatch.setattr(module, "sys", SimpleNamespace(stderr=screen))
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("COLUMNS", "100")
    return screen


def test_a_terminal_gets_a_bar_that_goes_when_it_is_done(terminal: Terminal) -> None:
    with progress("loading [bold]weights\x1b[2J", 4) as add:
        add(1)
        module._shown[0].refresh()
        seen = terminal.getvalue()
    assert "loading [bold]weights\\x1b[2J" in seen and "1 of 4" in seen and "━" in seen
    assert not module._shown
    assert terminal.getvalue().endswith("\r\x1b[2K\x1b[?25h\r"), "the line is erased"


def test_what_begins_within_something_else_shares_the_screen(terminal: Terminal) -> None:
    with progress("exporting", 3), progress("loading", 2 << 30, in_bytes=True) as add:
        add(1 << 30)
        module._shown[0].refresh()
        assert len(module._shown) == 1
    assert "exporting" in terminal.getvalue() and "1.0 GiB of 2.0 GiB" in terminal.getvalue()


def test_a_failure_takes_the_bar_away(terminal: Terminal) -> None:
    with pytest.raises(ValueError, match="no"), progress("x", 1):
        raise ValueError("no")
    assert not module._shown


def test_elsewhere_short_work_says_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    assert list(tracked("abc", "reading", 3)) == ["a", "b", "c"]
    with progress("x", 1) as add:
        add(1)
    assert capsys.readouterr().err == ""


def test_elsewhere_long_work_says_now_and_then_how_long_it_takes(capsys: pytest.CaptureFixture[str]) -> None:
    now = 0.0
    lines = _Lines("evaluating", 100, in_bytes=False, clock=lambda: now)
    for now in (1.0, LINE_INTERVAL_S, LINE_INTERVAL_S + 1, 2 * LINE_INTERVAL_S):  # noqa: B007  read by the clock
        lines.add(5)
    assert capsys.readouterr().err.splitlines() == [
        "evaluating: 10 of 100, about 4 min left",
        "evaluating: 20 of 100, about 4 min left",
    ]


def test_a_dumb_terminal_gets_no_bar(terminal: Terminal, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "dumb")
    with progress("x", 1) as add:
        add(1)
    assert terminal.getvalue() == ""


def test_bytes_of_a_download_are_counted_once() -> None:
    counted: list[float] = []
    bars = _counting(counted.append)
    files = bars(total=0, unit="B", unit_scale=True, desc="Reconstructing")
    files.update(7)
    bars(total=0, unit="B", desc="Downloading bytes").update(7)
    assert list(bars([1, 2], desc="Fetching 2 files")) == [1, 2]
    assert counted == [7]


def test_hashing_tells_every_byte(monkeypatch: pytest.MonkeyPatch) -> None:
    told: list[float] = []
    monkeypatch.setattr(_Lines, "add", lambda self, amount: told.append(amount))
    hash_weights(BUNDLED_FOLDER)
    num_bytes = (BUNDLED_FOLDER / "model.safetensors").stat().st_size
    assert 0.9 * num_bytes < sum(told) <= num_bytes, "all but the header"
