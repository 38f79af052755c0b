from __future__ import annotations

import gc
import subprocess
import sys
from collections.abc import Iterator

import pytest

from headrace import garbage


@pytest.fixture(autouse=True)
def _thawed() -> Iterator[None]:
    thresholds = gc.get_threshold()
    gc.unfreeze()
    yield
    gc.set_threshold(*thresholds)
    gc.unfreeze()


def test_old_objects_are_frozen_inside_and_thawed_after() -> None:
    with garbage.looked_for_less():
        assert gc.get_freeze_count() > 1000
        assert gc.get_threshold()[0] == garbage.NEW_OBJECTS
    assert gc.get_freeze_count() == 0
    assert gc.get_threshold()[0] < garbage.NEW_OBJECTS


def test_the_last_to_leave_restores() -> None:
    before = gc.get_threshold()
    first, second = garbage.looked_for_less(), garbage.looked_for_less()
    first.__enter__()
    second.__enter__()
    first.__exit__(None, None, None)
    assert gc.get_threshold()[0] == garbage.NEW_OBJECTS
    assert gc.get_freeze_count() > 0
    second.__exit__(None, None, None)
    assert gc.get_threshold() == before
    assert gc.get_freeze_count() == 0


def test_a_collector_that_never_runs_stays_so() -> None:
    gc.set_threshold(0)
    with garbage.looked_for_less():
        assert gc.get_threshold()[0] == 0


def test_what_others_have_frozen_stays_frozen() -> None:
    gc.freeze()
    count = gc.get_freeze_count()
    with garbage.looked_for_less():
        pass
    assert gc.get_freeze_count() > count // 2  # some of it may have been freed


def test_an_exception_restores_too() -> None:
    with pytest.raises(ValueError), garbage.looked_for_less():
        raise ValueError
    assert gc.get_freeze_count() == 0


def test_cycles_made_inside_are_found_after() -> None:
    script = """
import gc, weakref
from headrace import garbage
class Node: pass
with garbage.looked_for_less():
    node = Node(); node.itself = node; seen = weakref.ref(node); del node
gc.collect()
assert seen() is None
"""
    subprocess.run([sys.executable, "-c", script], check=True, timeout=60)


def test_collect_finds_also_what_is_left_alone() -> None:
    script = """
import gc, weakref
from headrace import garbage
class Node: pass
node = Node(); node.itself = node; seen = weakref.ref(node)
with garbage.looked_for_less():
    del node
    gc.collect()
    assert seen() is not None
    garbage.collect()
    assert seen() is None
    assert gc.get_freeze_count() > 0
"""
    subprocess.run([sys.executable, "-c", script], check=True, timeout=60)
