import threading
import time
from collections import Counter, deque
from contextlib import closing

from hypothesis import given
from hypothesis import strategies as st

from tests.support.evaluators import FakeEvaluator
from tests.support.nouns import Evaluator, OutputError, Patch, Support, TritonGemmError, fails
from tritongemm.tune.device_queue import DeviceQueue
from tritongemm.tune.free_devices import work_when_free


def test_a_free_device_draws_the_next_size(monkeypatch: Patch) -> None:
    monkeypatch.setattr(DeviceQueue, "EVEN_SECONDS", 0)
    queue = DeviceQueue[str, int](2)
    for size in ("a", "b", "c"):
        queue.put(size, 1)
    assert queue.draw(0) == ("a", [1]) and queue.draw(1) == ("b", [1])
    assert queue.draw(1) == ("c", [1]), "device 0 has not come back"


def test_a_device_that_starts_first_leaves_the_others_their_share(monkeypatch: Patch) -> None:
    """It had bound all sizes before the next was ready, and measured nearly all of them."""
    monkeypatch.setattr(DeviceQueue, "EVEN_SECONDS", 60)
    queue, drawn = DeviceQueue[str, int](2), list[object]()
    for size in ("a", "b", "c"):
        queue.put(size, 1)
    assert queue.draw(0) == ("a", [1])
    queue.put("a", 2)
    assert queue.draw(0) == ("a", [2]), "what it has bound it goes on with"
    waiting = threading.Thread(target=lambda: drawn.append(queue.draw(0)))
    waiting.start()
    waiting.join(0.05)
    assert waiting.is_alive() and queue.draw(1) == ("b", [1])
    waiting.join(10)
    assert drawn == [("c", [1])]


def test_a_device_that_does_not_come_is_not_waited_for_long(monkeypatch: Patch) -> None:
    monkeypatch.setattr(DeviceQueue, "EVEN_SECONDS", 0.05)
    queue = DeviceQueue[str, int](2)
    for size in ("a", "b"):
        queue.put(size, 1)
    assert [queue.draw(0) for _ in range(2)] == [("a", [1]), ("b", [1])]


def test_a_size_stays_on_its_device_and_a_closed_queue_wakes_who_waits() -> None:
    queue = DeviceQueue[str, int](2)
    queue.put("a", 1)
    assert queue.draw(1) == ("a", [1])
    queue.put("a", 2)
    queue.put("b", 3)
    assert queue.draw(0) == ("b", [3]), "a is device 1's"
    assert queue.draw(1) == ("a", [2])
    queue, drawn = DeviceQueue[str, int](), list[object]()

    def work() -> None:
        while (found := queue.draw(0)) is not None:
            drawn.append(found)

    thread = threading.Thread(target=work)
    thread.start()
    queue.put("a", 1)
    queue.close()
    thread.join(10)
    assert not thread.is_alive() and drawn == [("a", [1])], "what was queued before the end is done"


def test_what_is_drawn_together_last_and_not_any_more() -> None:
    """Races are held while nothing waits to be screened."""
    queue = DeviceQueue[str, int]()
    queue.put("a", 10, later=True)
    queue.put("b", 20, later=True)
    queue.put("a", 11, later=True)
    queue.put("b", 1)
    queue.put("b", 2)
    assert queue.draw(0) == ("b", [1, 2])
    queue.put("c", 3)
    assert [queue.draw(0) for _ in range(3)] == [("c", [3]), ("a", [10, 11]), ("b", [20])]
    queue = DeviceQueue[str, int]()
    for piece in range(DeviceQueue.MOST_DRAWN + 3):
        queue.put("a", piece)
    assert [len(works) for _, works in [queue.draw(0) or ("", []) for _ in range(2)]] == [DeviceQueue.MOST_DRAWN, 3]
    queue = DeviceQueue[str, int]()
    queue.put("a", 1)
    queue.put("b", 2, later=True)
    queue.close(abandon=True)
    assert queue.draw(0) is None


def test_devices_work_side_by_side() -> None:
    devices, both = [FakeEvaluator(), FakeEvaluator()], threading.Barrier(2, timeout=10)
    seen: dict[int, Evaluator] = {}

    def work(evaluator: Evaluator, thing: int) -> int:
        seen[thing] = evaluator
        both.wait()
        return thing * 10

    assert dict(work_when_free(devices, [1, 2], work, print)) == {1: 10, 2: 20}
    assert {id(one) for one in seen.values()} == {id(one) for one in devices}


@given(st.lists(st.integers(0, 9), max_size=12), st.sets(st.integers(0, 9)), st.integers(1, 3))
def test_what_fails_is_tried_once_more_and_comes_last(things: list[int], bad: set[int], count: int) -> None:
    tried: list[int] = []

    def work(evaluator: Evaluator, thing: int) -> int:
        tried.append(thing)
        if thing in bad:
            raise TritonGemmError(f"{thing} is too large")
        return thing

    found = list(work_when_free([FakeEvaluator() for _ in range(count)], things, work, lambda text: None))
    right, wrong = [t for t in things if t not in bad], [t for t in things if t in bad]
    assert sorted(thing for thing, _ in found[: len(right)]) == sorted(right)
    assert all(made == thing for thing, made in found[: len(right)])
    assert Counter(found[len(right) :]) == Counter((t, Support(f"{t} is too large")) for t in wrong)
    assert sorted(tried) == sorted(right + wrong + wrong)


def test_a_device_that_fails_again_and_again_is_given_up() -> None:
    """The other one does its work too; the last one is never given up."""
    broken, entire, said = FakeEvaluator(), FakeEvaluator(), list[str]()
    failures, waited = threading.Semaphore(0), list[bool]()

    def work(evaluator: Evaluator, thing: int) -> str:
        if evaluator is broken:
            failures.release()
            raise TritonGemmError("the GPU is gone")
        if not waited:
            waited.extend(failures.acquire(timeout=10) for _ in range(2))
        return "done"

    found = dict(work_when_free([entire, broken], range(8), work, said.append))
    assert found == dict.fromkeys(range(8), "done") and waited == [True, True]
    assert said == ["the device at place 1 of those named is given up: the GPU is gone"]


def test_what_is_known_does_not_wait_for_what_was_begun_before() -> None:
    """While one device takes long for the first thing, what the other one has done is handed out."""
    ended = threading.Event()
    work = lambda evaluator, thing: thing > 0 or ended.wait(10)
    with closing(work_when_free([FakeEvaluator(), FakeEvaluator()], range(4), work, print)) as outcomes:
        assert [next(outcomes)[0] for _ in range(3)] == [1, 2, 3]
        ended.set()
        assert list(outcomes) == [(0, True)]


def test_who_is_stopped_tries_nothing_more() -> None:
    begun: list[int] = []

    def work(evaluator: Evaluator, thing: int) -> int:
        begun.append(thing)
        time.sleep(0.01)
        if thing == 5:
            raise OutputError("the disk is full")
        return thing

    with closing(work_when_free([FakeEvaluator()], range(30), work, print)) as outcomes:
        assert next(outcomes) == (0, 0)
    assert len(begun) < 30
    begun.clear()
    fails(OutputError, "the disk is full", deque, work_when_free([FakeEvaluator()], range(30), work, print))
    assert 5 in begun and len(begun) < 30
