import pytest

from quantkit.progress import Silent, Tqdm


@pytest.mark.parametrize("progress", [Silent(), Tqdm()], ids=["silent", "tqdm"])
def test_nothing_reaches_stdout(progress, capsys) -> None:
    with progress.task("quantize", total=3) as task:
        task.advance(note="block 0")
        task.advance(2, note="block 2")
    progress.say("a line")
    assert capsys.readouterr().out == ""


def test_tqdm_shows_label_count_and_note(capsys) -> None:
    with Tqdm().task("quantize", total=3) as task:
        task.advance(3, note="block 2")
    shown = capsys.readouterr().err
    assert "quantize" in shown
    assert "3/3" in shown


def test_tqdm_writes_lines_beside_the_bar(capsys) -> None:
    Tqdm().say("30 linears to 4.3 bits")
    assert capsys.readouterr().err == "30 linears to 4.3 bits\n"
