"""Secrets: keys that do not show, numbers that do not repeat, files that only their owner reads."""

import copy
import json
import os
import pickle
import re
import warnings
from pathlib import Path

import pytest
import torch

from gramian.core.errors import GramianError
from gramian.privacy.noise import secrets as module
from gramian.privacy.noise.secrets import ReleaseCounter, Secrets, load_private, save_private
from tests.kit.fresh import run_fresh
from tests.kit.refusals import refusal


def raw(secrets):
    return bytes(secrets.state_dict()["key"].tolist())


def begun(path):
    return json.loads(path.read_text())["begun"]


def test_keys_come_from_the_operating_system_and_differ(monkeypatch):
    assert raw(Secrets()) != raw(Secrets())
    monkeypatch.setattr(os, "urandom", lambda count: b"\x07" * count)
    assert raw(Secrets()) == b"\x07" * 32


def test_subkeys_differ_by_label_and_by_key_and_are_not_the_key():
    one, other = Secrets(), Secrets()
    keys = [raw(one), one.noise_key, one.sampling_key, one.subkey("x"), other.noise_key, other.sampling_key]
    assert len(set(keys)) == 6 and all(len(key) == 32 for key in keys)
    assert one.noise_key == one.subkey("noise") and one.sampling_key == one.subkey("sampling")


def test_a_seed_is_reproducible_and_recorded_and_needs_to_be_asked_for():
    one = Secrets(insecure_reproducible=True, seed=3)
    assert raw(one) == raw(Secrets(insecure_reproducible=True, seed=3)) != raw(Secrets(insecure_reproducible=True))
    assert one.insecure_reproducible and one.state_dict()["insecure_reproducible"]
    assert not Secrets().insecure_reproducible
    with refusal("^seed: .*; expected insecure_reproducible=True"):
        Secrets(seed=3)


def test_neither_text_nor_pickle_shows_the_key():
    secrets = Secrets()
    for text in (repr(secrets), str(secrets), f"{secrets}"):
        assert text == "Secrets(insecure_reproducible=False)"
    for copied in (pickle.dumps, copy.copy, copy.deepcopy):
        with refusal("^secrets: .*; expected state_dict"):
            copied(secrets)


def in_child(work):
    """What a forked process says: the text of the GramianError, or "fine"."""
    read, write = os.pipe()
    child = os.fork()
    if child == 0:
        said = "lost"
        try:
            said = "fine" if work() is None else "another result"
        except GramianError as error:
            said = str(error)
        finally:
            os.write(write, said.encode())
            os._exit(0)
    os.close(write)
    with os.fdopen(read) as pipe:
        said = pipe.read()
    os.waitpid(child, 0)
    return said


def test_a_forked_process_draws_nothing_with_the_key_of_its_parent():
    secrets = Secrets()
    want = "engine: its key belongs to process .*, from which this one was forked, .*; expected a PrivacyEngine made in this"
    for use in (lambda: secrets.noise_key, lambda: secrets.sampling_key, lambda: secrets.refuse_forks()):
        assert re.match(want, in_child(use))
    assert secrets.noise_key, "the parent goes on"


def test_a_forked_process_may_have_a_key_of_its_own_or_be_given_one():
    secrets = Secrets()
    assert in_child(lambda: Secrets().refuse_forks()) == "fine"

    def given():  # as the processes of a run are, by the first of them
        mine = Secrets()
        mine.load_state_dict(secrets.state_dict())
        mine.refuse_forks()
        assert mine.noise_key == secrets.subkey("noise")

    assert "forked" in in_child(given), "the parent's object itself stays refused"

    def taken():
        mine = Secrets()
        mine.load_state_dict(secrets.state_dict())
        return None if len(mine.noise_key) == 32 else 1

    assert in_child(taken) == "fine"


def test_the_key_travels_through_a_file_that_is_loaded_without_running_code(tmp_path):
    secrets, path = Secrets(), tmp_path / "private.pt"
    save_private(path, {"secrets": secrets.state_dict(), "step": 3})
    state = torch.load(path, weights_only=True)
    assert state["secrets"]["key"].dtype == torch.uint8 and list(state["secrets"]["key"].shape) == [32]
    other = Secrets(insecure_reproducible=True)
    other.load_state_dict(load_private(path)["secrets"])
    assert raw(other) == raw(secrets) and other.noise_key == secrets.noise_key and not other.insecure_reproducible


@pytest.mark.parametrize(
    "state", [{}, {"key": b"x" * 32}, {"key": torch.zeros(31, dtype=torch.uint8)}, {"key": torch.zeros(32)}]
)
def test_a_state_without_a_key_is_refused(state):
    with refusal("^key: .*; expected a uint8 tensor of 32"):
        Secrets().load_state_dict(state)


def test_numbers_follow_each_other_and_are_counted():
    counter = ReleaseCounter()
    assert [counter.begin() for _ in range(3)] == [0, 1, 2]
    assert counter.spent == 3 and counter.released == 3


def test_the_file_holds_the_number_before_it_is_given(tmp_path, monkeypatch):
    counter, path = ReleaseCounter(), tmp_path / "releases.json"
    counter.bind(path)
    assert begun(path) == 0
    for number in range(3):
        assert counter.begin() == number and begun(path) == number + 1

    def full(path, mark, about=None):
        raise GramianError("disk: full; expected room")

    monkeypatch.setattr(module, "_write_mark", full)
    with refusal("disk"):
        counter.begin()
    assert counter.released == counter.spent == 3, "nothing began"


def test_the_mark_is_synced_before_and_after_the_rename(tmp_path, monkeypatch):
    log = []
    real_sync, real_replace = os.fsync, os.replace
    monkeypatch.setattr(os, "fsync", lambda fd: (log.append(os.path.isdir(f"/proc/self/fd/{fd}")), real_sync(fd)))
    monkeypatch.setattr(os, "replace", lambda a, b: (log.append("rename"), real_replace(a, b)))
    counter = ReleaseCounter()
    counter.bind(tmp_path / "releases.json")
    log.clear()
    counter.begin()
    assert log == [False, "rename", True], "file, rename, folder"
    assert os.listdir(tmp_path) == ["releases.json"], "no temporary file is left"


def test_a_replay_gives_the_same_numbers_again_and_counts_them_once(tmp_path):
    counter, path = ReleaseCounter(), tmp_path / "releases.json"
    counter.bind(path)
    for _ in range(5):
        counter.begin()
    counter.restore(2, replay=True)
    assert counter.spent == 5 and begun(path) == 5
    assert [counter.begin() for _ in range(4)] == [2, 3, 4, 5]
    assert counter.spent == 6 and begun(path) == 6


def test_anything_else_moves_past_every_number_begun(tmp_path):
    path = tmp_path / "releases.json"
    crashed = ReleaseCounter()
    crashed.bind(path)
    crashed.begin()
    crashed.begin()
    checkpoint = crashed.state_dict()
    for _ in range(3):
        crashed.begin()

    rolled_back = copy.copy(crashed)
    rolled_back.restore(2, replay=False)
    assert rolled_back.begin() == 5 and rolled_back.spent == 6

    resumed = ReleaseCounter()
    resumed.bind(path, must_exist=True)
    resumed.load_state_dict(checkpoint, replay=False)
    assert resumed.spent == 6 and resumed.begin() == 6

    replayed = ReleaseCounter()
    replayed.bind(path, must_exist=True)
    replayed.load_state_dict(checkpoint, replay=True)
    assert replayed.spent == 7 and replayed.begin() == 2 and replayed.spent == 7


def test_a_file_that_moved_on_since_it_was_bound_counts(tmp_path):
    path = tmp_path / "releases.json"
    counter = ReleaseCounter()
    counter.bind(path)
    path.write_text('{"begun": 40}')
    counter.restore(3, replay=False)
    assert counter.begin() == 40 and begun(path) == 41


@pytest.mark.parametrize("replay", [False, True])
def test_nothing_is_ever_refunded(tmp_path, replay):
    path = tmp_path / "releases.json"
    counter = ReleaseCounter()
    counter.bind(path)
    for _ in range(4):
        counter.begin()
    marks = []
    for released in (0, 3, 9, 1):
        counter.restore(released, replay)
        marks += [counter.spent, begun(path)]
        counter.begin()
        marks += [counter.spent, begun(path)]
    assert marks == sorted(marks) and marks[0] == 4


def test_a_state_saved_in_the_middle_of_a_replay_keeps_its_mark():
    counter = ReleaseCounter()
    for _ in range(5):
        counter.begin()
    counter.restore(1, replay=True)
    again = ReleaseCounter()
    again.load_state_dict(counter.state_dict(), replay=True)
    assert again.spent == 5 and again.begin() == 1
    fresh = ReleaseCounter()
    fresh.load_state_dict(counter.state_dict())
    assert fresh.begin() == 5, "not a replay unless said"


def test_binding_never_lowers_a_file_nor_a_counter(tmp_path):
    path = tmp_path / "releases.json"
    path.write_text('{"begun": 8}')
    behind = ReleaseCounter()
    behind.bind(path)
    assert behind.spent == 8 and begun(path) == 8 and behind.begin() == 8
    ahead = ReleaseCounter()
    ahead.restore(20, replay=False)
    ahead.bind(path)
    assert begun(path) == 20 and ahead.begin() == 20


@pytest.mark.xdist_group("fresh")
def test_a_process_killed_after_begin_has_left_its_mark(tmp_path):
    path = tmp_path / "releases.json"
    code = (
        "import os, signal, sys; from gramian.privacy.noise.secrets import ReleaseCounter; c = ReleaseCounter(); "
        "c.bind(sys.argv[1]); c.begin(); c.begin(); os.kill(os.getpid(), signal.SIGKILL)"
    )
    assert run_fresh(code, str(path)).returncode == -9
    counter = ReleaseCounter()
    counter.bind(path, must_exist=True)
    assert counter.begin() == 2


@pytest.mark.parametrize(
    "content", [b"", b"{}", b'{"begun": -1}', b'{"begun": true}', b'{"begun": "3"}', b"[1]", b"\xff"]
)
def test_a_damaged_counter_is_an_error_and_never_zero(tmp_path, content):
    path = tmp_path / "releases.json"
    path.write_bytes(content)
    with refusal(r"releases\.json: .*; expected") as error:
        ReleaseCounter().bind(path)
    assert "\n" not in str(error.value)


def test_bad_counters_are_one_line(tmp_path):
    with refusal(r"releases\.json: no such file; expected the release counter"):
        ReleaseCounter().bind(tmp_path / "releases.json", must_exist=True)
    with refusal("No such file or directory; expected a folder"):
        ReleaseCounter().bind(tmp_path / "missing" / "releases.json")
    with refusal("^released: -1; expected"):
        ReleaseCounter().restore(-1, replay=True)
    with refusal("^release counter: .*; expected"):
        ReleaseCounter().load_state_dict({"released": 1})


@pytest.mark.parametrize("mask", [0o000, 0o022])
def test_private_files_have_mode_0600_whatever_the_umask(tmp_path, mask):
    before = os.umask(mask)
    try:
        save_private(tmp_path / "private.pt", {"a": 1})
        counter = ReleaseCounter()
        counter.bind(tmp_path / "releases.json")
        counter.begin()
    finally:
        os.umask(before)
    for name in ("private.pt", "releases.json"):
        assert (tmp_path / name).stat().st_mode & 0o777 == 0o600


def test_a_failed_save_leaves_the_old_file(tmp_path):
    path = tmp_path / "private.pt"
    save_private(path, {"a": 1})
    with pytest.raises(Exception, match="pickle"):
        save_private(path, {"a": lambda: 1})
    assert load_private(path) == {"a": 1} and os.listdir(tmp_path) == ["private.pt"]


def test_a_file_others_can_read_is_loaded_with_a_warning(tmp_path):
    path = tmp_path / "private.pt"
    save_private(path, {"a": 1})
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert load_private(path) == {"a": 1}
    path.chmod(0o644)
    with pytest.warns(UserWarning, match=r"private\.pt: mode 0644 .*; expected 0600"):
        assert load_private(path) == {"a": 1}


class Sneaky:
    def __reduce__(self):
        return (os.system, ("touch sneaky",))


def test_unreadable_files_are_one_line(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    torch.save(Sneaky(), "sneaky.pt")
    save_private("whole.pt", {"a": torch.zeros(100)})
    Path("half.pt").write_bytes(Path("whole.pt").read_bytes()[:300])
    Path("text.pt").write_text("hello")
    Path("empty.pt").write_bytes(b"")
    for name in ("sneaky.pt", "half.pt", "text.pt", "empty.pt", "missing.pt", "."):
        with refusal(r"; expected a file written by save_private$") as error:
            load_private(name)
        assert "\n" not in str(error.value) and name in str(error.value)
    assert not Path("sneaky").exists()


@pytest.mark.skipif(os.geteuid() == 0, reason="root reads everything")
def test_a_file_without_permission_is_one_line(tmp_path):
    path = tmp_path / "private.pt"
    save_private(path, {"a": 1})
    path.chmod(0)
    with refusal("Permission denied; expected"):
        load_private(path)
