from quantkit.runtime import free_memory


def test_the_least_of_what_machine_and_container_have(tmp_path, monkeypatch):
    meminfo = tmp_path / "meminfo"
    monkeypatch.setattr(free_memory, "MEMINFO", meminfo)
    monkeypatch.setattr(free_memory, "CONTAINER", tmp_path)
    assert free_memory.free_bytes("cpu") is None
    meminfo.write_text("MemTotal:       16 kB\nMemAvailable:    8 kB\n")
    assert free_memory.free_bytes("cpu") == 8192
    (tmp_path / "memory.max").write_text("max\n")
    (tmp_path / "memory.current").write_text("1000\n")
    assert free_memory.free_bytes("cpu") == 8192
    (tmp_path / "memory.max").write_text("3000\n")
    assert free_memory.free_bytes("cpu") == 2000
    (tmp_path / "memory.current").write_text("5000\n")
    assert free_memory.free_bytes("cpu") == 0
