# SPDX-License-Identifier: Apache-2.0
"""Tests a device's recorder with the host's observations as input; needs no device."""

from __future__ import annotations

import pytest

from ringcomm import _native
from ringcomm.comm.recorder.reader import Trace, read, text_of
from ringcomm.comm.recorder.records import Recording, read_header, read_recorder
from ringcomm.errors import RingcommError
from ringcomm.memory.host_heap import process_heap

COLLECTIVES, MESSAGES = 0, 1
WORDS = _native.call_words(64, 1, 11, 0, 1)


class Recorder:
    """A recorder of rank 0 of 2; no kernel has given up."""

    def __init__(self, records: int = 8) -> None:
        heap = process_heap()
        self.records = records
        self.native = _native.DeviceRecorder(heap, (0, 2), records, "here")
        self.ptr = heap.base_ptr + self.native.offset_bytes
        page = heap.allocate(_native.HOST_PAGE_BYTES)
        memoryview(page)[:] = bytes(_native.HOST_PAGE_BYTES)
        self.page = memoryview(page)
        self.native.watch(page.ptr)

    def calls(self, count: int = 1, channels: int = 1, captured: bool = False) -> None:
        for _ in range(count):
            self.native.enqueue_triton(WORDS, channels, captured)

    def give_up(self) -> None:
        """Writes the word after `abort_requested`, as a kernel that gives up does."""
        self.page[4:8] = (1).to_bytes(4, "little")

    @property
    def memory(self) -> bytes:
        return _native.recorder_snapshot(self.ptr, self.records, (0, 2), 5)

    def states(self) -> list[str]:
        return [each.state for each in read_recorder(self.memory).collectives]


@pytest.fixture
def recorder() -> Recorder:
    return Recorder()


def test_an_event_ends_what_is_before_it(recorder: Recorder) -> None:
    recorder.calls(4)
    recorder.native.seen_completed(COLLECTIVES, 1, 2)
    assert recorder.states() == ["completed"] * 2 + ["enqueued"] * 2
    recorder.native.seen_completed(COLLECTIVES, 1, 9)  # more than there are
    recorder.calls()
    assert recorder.states() == ["completed"] * 4 + ["enqueued"]


def test_the_kernels_count_ends_what_is_before_the_last_that_began(recorder: Recorder) -> None:
    recorder.calls(4)
    recorder.native.seen_begun(0)
    assert recorder.states() == ["enqueued"] * 4
    recorder.native.seen_begun(3)
    assert recorder.states() == ["completed"] * 2 + ["begun", "enqueued"]
    recorder.native.seen_begun(2)  # a delayed, older observation
    assert recorder.states() == ["completed"] * 2 + ["begun", "enqueued"]


def test_nothing_ends_well_once_a_kernel_has_given_up(recorder: Recorder) -> None:
    """Kernels that give up end as well: their events pass, and their count increases."""
    recorder.calls(4)
    recorder.native.seen_completed(COLLECTIVES, 1, 1)
    recorder.give_up()
    recorder.native.seen_completed(COLLECTIVES, 1, 4)
    recorder.native.seen_begun(4)
    assert recorder.states() == ["completed"] + ["enqueued"] * 3
    recorder.native.seen_failed(COLLECTIVES, 3, _native.STATUSES["timeout"], 1)
    assert recorder.states() == ["completed"] * 2 + ["failed"] * 2
    found = read_recorder(recorder.memory).collectives
    assert [(each.status, each.peer) for each in found[2:]] == [("timeout", 1), ("aborted", -1)]


def test_nothing_ends_well_once_the_host_has_stopped_it(recorder: Recorder) -> None:
    recorder.calls(2)
    recorder.native.stop()
    recorder.native.seen_completed(COLLECTIVES, 1, 2)
    recorder.native.seen_begun(2)
    assert recorder.states() == ["enqueued"] * 2


def test_a_captured_call_is_never_over_and_makes_the_count_say_nothing(recorder: Recorder) -> None:
    recorder.calls()
    recorder.calls(captured=True)
    recorder.calls(2)
    recorder.native.seen_begun(4)
    assert recorder.states() == ["enqueued", "captured", "enqueued", "enqueued"]
    recorder.native.seen_completed(COLLECTIVES, 1, 3)
    assert recorder.states() == ["completed", "captured", "completed", "enqueued"]


def test_old_calls_are_forgotten_and_new_ones_kept_apart(recorder: Recorder) -> None:
    recorder.calls(20)
    recorder.native.seen_begun(14)
    found = read_recorder(recorder.memory).collectives
    assert [each.number for each in found] == list(range(13, 21))
    assert recorder.states() == ["completed", "begun"] + ["enqueued"] * 6
    recorder.native.seen_failed(COLLECTIVES, 5, _native.STATUSES["timeout"], 1)
    assert "failed" not in recorder.states()


def test_calls_by_the_numbers_of_their_blocks(recorder: Recorder) -> None:
    """Each block counts the calls in which it took part."""
    for channels in (4, 1, 4, 1, 2):
        recorder.calls(channels=channels)
    # Calls as counted by block 0: 1 2 3 4 5, block 1: 1 - 2 - 3, blocks 2 and 3: 1 - 2 - -.
    assert [recorder.native.numbers_of(each) for each in range(7)] == [
        [],
        [1],
        [3, 2],
        [5, 3],
        [4],
        [5],
        [],
    ]
    recorder.calls(captured=True)
    assert recorder.native.numbers_of(9) == [6, 5, 4, 3, 2, 1]


def test_a_withdrawn_call_leaves_no_trace_in_the_numbers(recorder: Recorder) -> None:
    recorder.calls(2, channels=3)
    recorder.native.withdraw()
    assert recorder.native.enqueued(COLLECTIVES) == 1
    assert recorder.states() == ["enqueued", "failed"]
    assert recorder.native.numbers_of(2) == []
    recorder.calls()
    assert recorder.native.numbers_of(2) == [2] and recorder.states() == ["enqueued"] * 2


def test_what_was_given_back_is_not_written_to(recorder: Recorder) -> None:
    used = process_heap().used_bytes
    before = recorder.memory
    recorder.native.release()
    recorder.native.release()
    assert process_heap().used_bytes == used - 256 * (1 + 2 * 8 * 3 // 4 + 3)
    recorder.calls()
    recorder.native.seen_completed(COLLECTIVES, 1, 1)
    recorder.native.seen_failed(COLLECTIVES, 1, _native.STATUSES["timeout"], 1)
    recorder.native.withdraw()
    assert recorder.memory == before


def test_a_recorder_says_that_it_is_of_a_device(recorder: Recorder, tmp_path: object) -> None:
    header = read_header(recorder.memory)
    assert (header.on_device, header.rank, header.world_size) == (True, 0, 2)
    assert (header.world_id, header.name) == (5, "here")


def test_a_trace_keeps_the_states_of_devices(recorder: Recorder, tmp_path) -> None:
    recorder.calls(3)
    recorder.calls(captured=True)
    recorder.native.seen_begun(0)
    recorder.native.seen_completed(COLLECTIVES, 1, 1)
    ranks = (read_recorder(recorder.memory),)
    trace = Trace(Recording("here", 2, 5, 10**18, ranks), 0, 1.0, "it broke")
    path = tmp_path / "trace.json"
    path.write_text(text_of(trace))
    assert read(path) == trace
    path.write_text(text_of(trace).replace('"captured"', '"captures"'))
    with pytest.raises(RingcommError, match="sha256"):
        read(path)


def test_the_number_of_records_is_checked() -> None:
    for wrong in (0, (1 << 16) + 1):
        with pytest.raises(ValueError, match="records must be in"):
            _native.DeviceRecorder(process_heap(), (0, 2), wrong, "here")
