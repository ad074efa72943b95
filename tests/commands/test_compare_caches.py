"""One candidate behind several caches: figures are in tests/cli/test_evaluate.py."""

import tiny

from quantkit.commands.compare_caches import compare_caches
from quantkit.progress import Silent
from quantkit.runtime import load as runtime_load
from quantkit.settings import CompareSettings, TextSettings


def test_each_model_is_read_once(tmp_path, monkeypatch):
    folders = [tiny.write_model(tmp_path / name, seed=seed) for seed, name in enumerate(("reference", "candidate"))]
    (tmp_path / "text.txt").write_text("the end of the sands " * 20)
    text = TextSettings(text=tmp_path / "text.txt", length=32, windows=1)
    read, real = [], runtime_load.check_contents

    def counted(checkpoint, *others):
        read.append(checkpoint.path.name)
        return real(checkpoint, *others)

    monkeypatch.setattr(runtime_load, "check_contents", counted)
    table = compare_caches(CompareSettings(*map(str, folders), text), ("fp16", "int8", "q4_0"), Silent())
    assert read == ["reference", "candidate"] and [row[0] for row in table.rows()] == ["fp16", "int8", "q4_0"]
