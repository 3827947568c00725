# SPDX-License-Identifier: Apache-2.0
"""All executions of a few threads under C++'s memory orders, by brute force.

The machine of views of Kang et al., "A promising semantics for relaxed-memory concurrency" (POPL
2017), without promises: memory keeps every message that was ever stored to a location, in its
modification order, and a thread may read any that its view has not passed. Acquire, release and
fences move views along. The machine shows every reordering that C++ allows but one: load buffering,
where a load reads from a store that is later in program order. No compiler or machine does this if
the store depends on the load, as all stores here do.

Non-atomic accesses are checked for data races: an access that the thread's view does not order
behind every other access that conflicts with it.

Programs are lists of operations (litmus_ops.py) and run once from top to bottom.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from tests.proof.litmus.litmus_ops import Location, Op

View = tuple[tuple[Location, "Id"], ...]  # sorted
Id = tuple[int, int]  # thread and position in its program; a position stores only once
INITIAL: Id = (-1, -1)
BUCKET = "futex bucket"


@dataclass(frozen=True)
class Message:
    """A stored value; ``glued``: stored by a read-modify-write of the previous message."""

    id: Id
    value: int
    view: View
    glued: bool = False


@dataclass(frozen=True)
class Thread:
    pc: int = 0
    now: View = ()  # the messages that it has seen
    on_acquire: View = ()  # the messages that it will have seen after an acquire fence
    at_release: View = ()  # the messages that it had seen at its last release fence
    registers: tuple[tuple[str, int], ...] = ()
    asleep_on: Location = ""


@dataclass(frozen=True)
class State:
    memory: tuple[tuple[Location, tuple[Message, ...]], ...]
    threads: tuple[Thread, ...]
    fences: View = ()  # the messages that the sequentially consistent fences have seen so far


class DataRace(AssertionError):
    """Two non-atomic accesses, at least one of them a store, are not ordered."""


class Machine:
    """Runs programs; one list of operations per thread."""

    def __init__(self, programs: Sequence[Sequence[Op]]) -> None:
        self.programs = programs

    def outcomes(self) -> set[tuple[tuple[tuple[str, int], ...] | None, ...]]:
        """Returns each thread's registers, or None if the thread waits or sleeps forever.

        Raises:
            DataRace: some execution has one.
        """
        start = State((), tuple(Thread() for _ in self.programs))
        seen, pending, ends = {start}, [start], set()
        while pending:
            state = pending.pop()
            after = [each for t in range(len(self.programs)) for each in self._step(state, t)]
            if not after:
                ends.add(
                    tuple(
                        thread.registers if self._ended(t, thread) else None
                        for t, thread in enumerate(state.threads)
                    )
                )
            fresh = set(after) - seen
            seen |= fresh
            pending.extend(fresh)
        return ends

    def _ended(self, number: int, thread: Thread) -> bool:
        return thread.pc >= len(self.programs[number]) and not thread.asleep_on

    def _step(self, state: State, number: int) -> Iterator[State]:
        thread = state.threads[number]
        if thread.pc >= len(self.programs[number]) or thread.asleep_on:
            return
        op = self.programs[number][thread.pc]
        world = _World(state, number, op)
        yield from getattr(world, op.kind)()


class _World:
    """One operation of one thread, in a state."""

    def __init__(self, state: State, number: int, op: Op) -> None:
        self.state, self.number, self.op = state, number, op
        self.memory = dict(state.memory)
        thread = state.threads[number]
        self.id = (number, thread.pc)
        self.thread = replace(thread, pc=thread.pc + 1)

    # ---- memory -------------------------------------------------------------------------------

    def messages(self, location: Location) -> tuple[Message, ...]:
        return self.memory.get(location, (Message(INITIAL, 0, ()),))

    def position(self, location: Location, view: View) -> int:
        wanted = dict(view).get(location, INITIAL)
        ids = [message.id for message in self.messages(location)]
        return ids.index(wanted)

    def join(self, *views: View) -> View:
        joined: dict[Location, Id] = {}
        for view in views:
            for location, name in view:
                at = self.position(location, ((location, name),))
                if at >= self.position(location, tuple(joined.items())):
                    joined[location] = name
        return tuple(sorted(joined.items()))

    def insert(self, location: Location, at: int, message: Message) -> None:
        before = self.messages(location)
        self.memory[location] = (*before[:at], message, *before[at:])

    def done(self, thread: Thread, fences: View | None = None) -> State:
        threads = list(self.state.threads)
        threads[self.number] = thread
        return State(
            tuple(sorted(self.memory.items())),
            tuple(threads),
            self.state.fences if fences is None else fences,
        )

    def keeping(self, thread: Thread, value: int) -> Thread:
        if not self.op.register:
            return thread
        registers = {**dict(thread.registers), self.op.register: value}
        return replace(thread, registers=tuple(sorted(registers.items())))

    # ---- words --------------------------------------------------------------------------------

    def seen(self, message: Message, order: str) -> Thread:
        """The thread after it has read a message."""
        thread, mark = self.thread, ((self.op.location, message.id),)
        now = self.join(thread.now, mark, message.view if order in ("acquire", "acq_rel") else ())
        return replace(thread, now=now, on_acquire=self.join(thread.on_acquire, now, message.view))

    def load(self) -> Iterator[State]:
        location = self.op.location
        first = self.position(location, self.thread.now)
        for message in self.messages(location)[first:]:
            yield self.done(self.keeping(self.seen(message, self.op.order), message.value))

    def wait(self) -> Iterator[State]:
        location = self.op.location
        first = self.position(location, self.thread.now)
        for message in self.messages(location)[first:]:
            if message.value >= self.op.value:
                yield self.done(self.seen(message, self.op.order))

    def stored(self, thread: Thread, at: int, glued_view: View = (), glued: bool = False) -> Thread:
        """Puts the message at a position of the modification order."""
        location, order = self.op.location, self.op.order
        self.insert(location, at, Message(self.id, self.op.value, (), glued))
        mark = ((location, self.id),)
        now = self.join(thread.now, mark)
        released = now if order in ("release", "acq_rel") else thread.at_release
        view = self.join(released, mark, glued_view)
        self.memory[location] = tuple(
            replace(each, view=view) if each.id == self.id else each
            for each in self.memory[location]
        )
        return replace(thread, now=now, on_acquire=self.join(thread.on_acquire, now))

    def store(self) -> Iterator[State]:
        location, before = self.op.location, dict(self.memory)
        messages = self.messages(location)
        for at in range(self.position(location, self.thread.now) + 1, len(messages) + 1):
            if at < len(messages) and messages[at].glued:
                continue
            self.memory = dict(before)
            yield self.done(self.stored(self.thread, at))

    def exchange(self) -> Iterator[State]:
        location, before = self.op.location, dict(self.memory)
        messages = self.messages(location)
        for at in range(self.position(location, self.thread.now), len(messages)):
            if at + 1 < len(messages) and messages[at + 1].glued:
                continue
            self.memory = dict(before)
            found = messages[at]
            thread = self.stored(self.seen(found, self.op.order), at + 1, found.view, True)
            yield self.done(self.keeping(thread, found.value))

    def fence(self) -> Iterator[State]:
        thread = self.thread
        now = self.join(thread.now, thread.on_acquire)
        fences = None
        if self.op.order == "seq_cst":
            now = fences = self.join(now, self.state.fences)
        yield self.done(replace(thread, now=now, on_acquire=now, at_release=now), fences)

    # ---- data --------------------------------------------------------------------------------

    def _check_order(self, kind: str, locations: Sequence[Location]) -> None:
        for location in locations:
            if self.position(location, self.thread.now) != len(self.messages(location)) - 1:
                raise DataRace(f"thread {self.number} {kind} {self.op.location} unordered")

    def _reads(self, location: Location) -> list[Location]:
        """Returns locations that represent each thread's reads of this location."""
        return [f"reads of {location} by {t}" for t in range(len(self.state.threads))]

    def read(self) -> Iterator[State]:
        location = self.op.location
        self._check_order("reads", [location])
        value = self.messages(location)[-1].value
        mine = self._reads(location)[self.number]
        self.insert(mine, len(self.messages(mine)), Message(self.id, 0, ()))
        now = self.join(self.thread.now, ((mine, self.id),))
        yield self.done(self.keeping(replace(self.thread, now=now), value))

    def write(self) -> Iterator[State]:
        location = self.op.location
        self._check_order("writes", [location, *self._reads(location)])
        yield self.done(self.stored(self.thread, len(self.messages(location))))

    # ---- sleeping -----------------------------------------------------------------------------

    def _locked(self) -> Thread:
        """Returns the thread inside the kernel's lock, which orders the threads that take it."""
        bucket = self.messages(BUCKET)
        now = self.join(self.thread.now, bucket[-1].view)
        self.insert(BUCKET, len(bucket), Message(self.id, 0, now))
        return replace(self.thread, now=now)

    def sleep(self) -> Iterator[State]:
        location, self.thread = self.op.location, self._locked()
        first = self.position(location, self.thread.now)
        for message in self.messages(location)[first:]:
            thread = self.seen(message, "relaxed")
            asleep = location if message.value == self.op.value else ""
            yield self.done(replace(thread, asleep_on=asleep))

    def wake(self) -> Iterator[State]:
        state = self.done(self._locked())
        woken = tuple(
            replace(each, asleep_on="") if each.asleep_on == self.op.location else each
            for each in state.threads
        )
        yield replace(state, threads=woken)

    def only_if(self) -> Iterator[State]:
        met = dict(self.thread.registers).get(self.op.register) == self.op.value
        yield self.done(self.thread if met else replace(self.thread, pc=1 << 30))
