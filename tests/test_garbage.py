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
    gc.freeze()  # as it was after the collection of the tests


def test_old_objects_are_frozen_inside_and_unfrozen_after() -> None:
    with garbage.collecting_less_often():
        assert gc.get_freeze_count() > 1000
        assert gc.get_threshold()[0] == garbage.NEW_OBJECTS
    assert gc.get_freeze_count() == 0
    assert gc.get_threshold()[0] < garbage.NEW_OBJECTS


def test_the_last_to_leave_restores() -> None:
    before = gc.get_threshold()
    first, second = garbage.collecting_less_often(), garbage.collecting_less_often()
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
    with garbage.collecting_less_often():
        assert gc.get_threshold()[0] == 0


def test_what_others_have_frozen_stays_frozen() -> None:
    gc.freeze()
    count = gc.get_freeze_count()
    with garbage.collecting_less_often():
        pass
    assert gc.get_freeze_count() > count // 2  # some of it may have been freed


def test_an_exception_restores_too() -> None:
    with pytest.raises(ValueError), garbage.collecting_less_often():
        raise ValueError
    assert gc.get_freeze_count() == 0


def test_cycles_made_inside_are_collected_after() -> None:
    script = """
import gc, weakref
from headrace import garbage
class Node: pass
with garbage.collecting_less_often():
    node = Node(); node.itself = node; seen = weakref.ref(node); del node
gc.collect()
assert seen() is None
"""
    subprocess.run([sys.executable, "-c", script], check=True, timeout=60)


def test_collect_also_collects_frozen_objects() -> None:
    script = """
import gc, weakref
from headrace import garbage
class Node: pass
node = Node(); node.itself = node; seen = weakref.ref(node)
with garbage.collecting_less_often():
    del node
    gc.collect()
    assert seen() is not None
    garbage.collect()
    assert seen() is None
    assert gc.get_freeze_count() > 0
"""
    subprocess.run([sys.executable, "-c", script], check=True, timeout=60)
