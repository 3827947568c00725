"""The native host backend: addresses, sizes and codes in, status codes out.

Every collective blocks without the GIL and returns 0, or a nonzero status after which
`Comm.fault()` tells what happened. Ctrl-C inside a wait aborts the communicator and raises
KeyboardInterrupt. Buffers are contiguous; a buffer that lies in the heap moves without a staging
copy.
"""

from collections.abc import Callable, Sequence
from typing import Any

DTYPES: dict[str, int]
"""Code of each element type, by torch's name ("float32", "bfloat16", "float8_e4m3fn", ...)."""
OPS: dict[str, int]
"""Code of each operator: SUM AVG PREMUL_SUM PRODUCT MIN MAX BAND BOR BXOR."""
ALGORITHMS: dict[str, int]
"""Code of each algorithm: auto, direct, ring; on devices also packet and copy."""

COLLECTIVES: dict[str, int]
"""Code of each collective that has Triton kernels, as headers carry it."""
STATUSES: dict[str, int]
"""Code of each way in which a wait can end other than well."""
STREAMS: dict[str, int]
"""Code of each kind of traffic: pair, shared."""
STRUCTURES: dict[str, int]
"""Offsets "structure.field" and sizes "structure", in bytes, of what the Triton kernels touch."""

OPTIMIZER_STRUCTURES: dict[str, int]
"""The same of what an AdamW step works on (ringcomm/optimizer/adamw.h)."""

NOT_PLAIN: int
"""What a `*_plain` method returns of tensors, an op or an algorithm that it does not take."""

def watch_keys(watched: int) -> bool:
    """Sets the keys of torch's dispatcher that `intercepting_keys` tells of.

    False: this torch does not keep them where they are looked for, and none is ever told of.
    """

def intercepting_keys() -> int:
    """Returns the watched keys that the calling thread adds to each dispatch, as a word."""

def read_keys_at(impl_offset: int, keys_offset: int, plain_keys: int) -> None:
    """Has the dispatch keys of tensors read from memory, instead of asking each for a negation.

    The offsets in bytes are those of the implementation in a tensor's object, and of the keys in
    it. A tensor with a key beyond `plain_keys` is not plain.
    """

def read_tensors_with(
    exchange: object, names: dict[str, object], ops: list[tuple[object, int]]
) -> bool:
    """Has tensors read through DLPack's C exchange interface.

    `names` has torch's `Tensor` and `Parameter`, of exactly which classes tensors are read, its
    methods `is_neg` and `is_grad_enabled`, their property `requires_grad`, its dtypes `int8` and
    `uint8`, the names of its module `forward_ad`, and `ReduceOp`, the class of whatever has the
    hash of one of `ops` and means the same. `ops` are the constants that stand for the codes of
    `OPS`. False: the interface is one
    that cannot read, and no tensor is plain.
    """

def is_plain(tensor: object) -> bool:
    """Tells whether a tensor's memory can be used as it is.

    The tensor is contiguous and on the CPU, has neither a pending negation nor a gradient, and no
    mode, transform or trace of torch is active on the thread.
    """

def call_words(
    match_bytes: int, collective: int, dtype: int, redop: int, algorithm: int, root: int = -1
) -> tuple[int, int, int, int]:
    """Returns the words of a Triton call's header behind its sequence number."""

def layout_offset(
    sizes: tuple[int, int, int, int],
    what: str,
    stream: int = 0,
    channel: int = 0,
    peer: int = 0,
    slot: int = 0,
) -> int:
    """Returns the place in a region of a signal, epoch, channel line, header, slot or the staging.

    `sizes` are world, channels, slots and segment_bytes.
    """

RECORD_NAMES: dict[str, list[str]]
"""Names by code, as records carry them: collectives, dtypes, ops, algorithms."""
MAX_RECORDS: int

def grad_tag(module: int, backward: int, bucket: int) -> int:
    """Tells reductions of gradients of one size apart; counts wrap around."""

def describe_tag(tag: int) -> str:
    """A tag that is not 0, in words."""

def results_and_tag(root: int) -> tuple[int, int]:
    """The dtype of its results and the tag, which an optimizer's call has in place of a root."""

def clock_pair() -> tuple[int, int]:
    """Now, in ticks of the records' clock and in ns of CLOCK_MONOTONIC."""

def set_library_folders(library: list[str], programs: list[str]) -> None:
    """Frames of files whose paths begin so are no call sites, but for those of `programs`."""

def call_site() -> int:
    """The innermost frame outside the library, for `hold_call_site`; 0: there is none."""

def hold_call_site(site: int) -> None:
    """From here on calls of this thread count as made there; 0: where they are made."""

def arm_fault(
    action: str,
    passage: int = 1,
    seconds: float = 0.0,
    rank: int = -1,
    sequence: int = 0,
) -> None:
    """Made for tests: has a fault happen when this process passes a point of the protocol.

    Points are each publication, each acknowledgement and each wait of a call (docs/reliability.md).
    The plan before it is forgotten, and passages are counted from 0.

    Args:
        action: "none" (only count), "kill" (SIGKILL), "stop" (SIGSTOP), "delay" (sleep once) or
            "slow" (sleep there and at each later passage).
        passage: where, counted from 1.
        seconds: of a delay, or of each sleep.
        rank: counts passages of this rank alone, for ranks that are threads; -1: of all. A thread
            cannot be killed or stopped.
        sequence: counts passages of this collective of a communicator alone, numbered from 1; 0: of
            all, and of messages.

    Raises:
        ValueError: an argument out of range.
    """

def disarm_fault() -> None:
    """Nothing happens any more, and nothing is counted."""

def fault_passages() -> dict[str, int]:
    """Counts the points passed since `arm_fault`, by kind: publish, acknowledge, await."""

def fault_armed() -> bool:
    """Tells whether a plan is armed."""

def pass_fault_point(point: int, rank: int, sequence: int) -> None:
    """For what passes a point in Python; `sequence` 0: no collective."""

FAULT_POINTS: dict[str, int]
"""Code of each kind of point: publish, acknowledge, await."""

MISMATCH: int
"""Status of a receive whose message had another size; the communicator stays usable."""

def supports(dtype: int, op: int) -> bool:
    """Tells whether `op` can reduce `dtype`."""

def accumulator(dtype: int) -> int:
    """Returns the dtype in which reductions of `dtype` accumulate, that of partial results."""

def combine_partials(
    in_ptrs: list[int],
    in_dtype: int,
    out_ptr: int,
    out_dtype: int,
    elems: int,
    op: int,
    divide_by: int = 0,
) -> None:
    """Combines local arrays element by element, in list order, and rounds once to `out_dtype`.

    Its arithmetic is that of the collectives, in the accumulator's type: of `reduce_partial` of
    blocks of ranks it makes what a communicator with `sum_blocks` makes of all ranks. PREMUL_SUM
    adds, as its factors are applied already. `divide_by` > 0 divides the sum, whichever op that
    adds is named. The dtypes are equal, or one is the other's accumulator; with one array this
    narrows or widens. `out_ptr` may be an input of its own dtype exactly, and else lies apart.

    Raises:
        ValueError: no array, or the dtypes and the op do not fit.
    """

def wire_bytes(wire: int, elems: int) -> int:
    """Returns the bytes of so many numbers in a coded wire, scales included."""

def encode_wire(
    wire: int, in_ptr: int, dtype: int, out_ptr: int, elems: int, residual_ptr: int = 0
) -> None:
    """Encodes float32, bfloat16 or float16 numbers, in blocks of `WIRE_BLOCK`.

    The numbers are in + residual, where there is a residual [elems] in float32; it is overwritten
    by what the codes leave out, and by 0 in blocks with infinities or NaNs.

    Raises:
        ValueError: no such wire, or another dtype.
    """

def sum_wires(
    wire: int, in_ptrs: list[int], out_ptr: int, dtype: int, elems: int, divide_by: int = 0
) -> None:
    """Decodes arrays of codes and adds them up in float32, in list order, rounded once to `dtype`.

    `divide_by` > 0 divides the sum.

    Raises:
        ValueError: no array, no such wire, or a dtype that is not float32, bfloat16 or float16.
    """

WIRES: dict[str, int]
"""Code of each coded wire: int8, fp8 and int4."""

WIRE_BLOCK: int
"""Numbers that share a scale."""

SOURCE_WORDS: int
"""Words of a row's source: two entries of a table of rows, as `copy_rows` reads them."""

def sort_by_expert(
    topk_idx_ptr: int, assignments: int, experts: int, order_ptr: int, counts_ptr: int
) -> int:
    """Sorts assignments (token t's to its j-th expert is t k + j) by expert, each in their order.

    Writes order int64 [assignments], of which those of expert -1 (none) are left out, and counts
    int64 [experts]. Returns the first assignment whose expert is out of range, or -1.
    """

def count_rows(counts_ptrs: list[int], first: int, experts_here: int) -> int:
    """Returns how many rows experts [first, first + experts_here) have, of all ranks' counts."""

def find_places(
    order_ptrs: list[int],
    counts_ptrs: list[int],
    rank: int,
    experts: int,
    assignments: int,
    out_ptr: int,
) -> None:
    """Writes int64 [assignments, 2]: the rank that an assignment of `rank` goes to, and its row.

    `order_ptrs` and `counts_ptrs` are those of all ranks, as `sort_by_expert` wrote them. -1 stands
    for the rank of an assignment to no expert.
    """

def list_sources(
    order_ptrs: list[int],
    counts_ptrs: list[int],
    first: int,
    experts_here: int,
    k: int,
    out_ptr: int,
    counts_out_ptr: int,
) -> None:
    """Writes int64 [rows, SOURCE_WORDS] for the rows of experts [first, first + experts_here).

    A row has the rank of its token, the token, the rank again, and the assignment. Rows are sorted
    by expert, rank and assignment. Also writes how many rows each of these experts has, int64.
    """

def copy_rows(
    entries_ptr: int,
    entry_words: int,
    count: int,
    base_ptrs: list[int],
    row_bytes: int,
    out_ptr: int,
) -> None:
    """Copies rows that lie apart: of each entry, row `entry[1]` of the array `base_ptrs[entry[0]]`.

    Entries are int64 [count, entry_words]. A negative entry[0] gives zeros.
    """

def encode_rows(wire: int, in_ptr: int, dtype: int, count: int, elems: int, out_ptr: int) -> None:
    """Encodes rows of `elems` numbers, each as `encode_wire` does."""

def decode_rows(
    wire: int,
    entries_ptr: int,
    entry_words: int,
    count: int,
    base_ptrs: list[int],
    dtype: int,
    elems: int,
    out_ptr: int,
) -> None:
    """Decodes rows that lie apart, found as by `copy_rows`."""

def sum_rows(
    entries_ptr: int,
    base_ptrs: list[int],
    tokens: int,
    k: int,
    weights_ptr: int,
    dtype: int,
    elems: int,
    out_ptr: int,
) -> None:
    """Writes for each token the sum of weight times row of its k entries, found as by `copy_rows`.

    Entries are int64 [tokens, k, 2], weights float32 [tokens, k]; 0 as `weights_ptr` means none.
    Products and sums are in float32, in the order of k, and the sum is rounded once to `dtype`.
    """

def scale_rows(
    entries_ptr: int,
    count: int,
    base_ptrs: list[int],
    weights_ptr: int,
    with_ptr: int,
    dtype: int,
    elems: int,
    out_ptr: int,
    dots_ptr: int,
) -> None:
    """Writes weight times row of the sources [count, SOURCE_WORDS], found as by `copy_rows`.

    Also writes, in float32, the scalar product of each row and of that of `with_ptr`.
    """

def isa() -> str:
    """The instruction set in use: "avx512", "avx2", or "baseline" (SSE2 or NEON)."""

def force_isa(name: str) -> bool:
    """Uses another instruction set from here on (a test knob); "" restores the best one.

    False when this CPU lacks it.
    """

def wait_in_background() -> None:
    """From here on the calling thread leaves the core at once when it must wait for a peer."""

class Block:
    """Memory of the heap, as a writable buffer. It returns to the heap with the last reference."""

    @property
    def ptr(self) -> int: ...
    @property
    def offset_bytes(self) -> int: ...
    @property
    def size_bytes(self) -> int: ...
    def __buffer__(self, flags: int, /) -> memoryview: ...

class Heap:
    """This process's symmetric heap: shared memory without a name, reclaimed by the kernel.

    `directory` "" takes anonymous memory (memfd); else an unnamed file in that tmpfs or hugetlbfs.
    Memory is committed as blocks are handed out, as far as the machine and the `memory_groups`
    (folders of control groups) have it. Raises OSError (errno, text naming need and free).
    """

    def __init__(
        self, capacity_bytes: int, directory: str = "", memory_groups: Sequence[str] = ()
    ) -> None: ...
    def allocate(self, size_bytes: int) -> Block:
        """Raises OSError: ENOBUFS when the heap is full, ENOMEM memory, ENOSPC the folder."""
    def contains(self, ptr: int, size_bytes: int) -> bool: ...
    @property
    def fd(self) -> int: ...
    @property
    def base_ptr(self) -> int: ...
    @property
    def capacity_bytes(self) -> int: ...
    @property
    def committed_bytes(self) -> int: ...
    @property
    def used_bytes(self) -> int: ...
    @property
    def largest_free_bytes(self) -> int: ...
    @property
    def token(self) -> int: ...
    @property
    def huge_bytes(self) -> int:
        """Bytes of the heap that huge pages back so far."""

class ScratchPool:
    """A few threads that write and read a file open for direct I/O, in blocks.

    The descriptor stays the caller's, and must be open until close(). Requests that share a block
    or bytes of memory run in the order of their submission. Addresses and sizes are multiples of
    4096. Each block has checksums in RAM, of its last write, that reads compare. In a forked child
    nothing of it may be called.
    """

    def __init__(self, fd: int, threads: int = ..., cut_bytes: int = ...) -> None:
        """`threads` share a request in pieces of `cut_bytes`."""
    def add_block(self, size_bytes: int) -> int:
        """Reserves space at the end of the file. Raises OSError."""
    def write(self, block: int, ptr: int, size_bytes: int) -> ScratchRequest:
        """Raises ValueError for what does not fit, and OSError where no thread starts."""
    def read(self, block: int, ptr: int, size_bytes: int) -> ScratchRequest:
        """Reads as many bytes as the last write had; of a block without one, any number of zeros.

        Raises as write().
        """
    def counters(self) -> dict[str, int]:
        """bytes_read, bytes_written; reading_ns, writing_ns: while at least one was under way."""
    def close(self, limit_s: float, kept: object) -> bool:
        """What has not begun ends as "closed"; returns True when nothing is under way.

        Returns False after the limit. Then the pool keeps ``kept`` alive until a later call has
        returned True; the descriptor and all memory under transfer must stay as long.
        """

class ScratchRequest:
    """A read or write; its memory must stay until it is done."""

    def done(self) -> bool: ...
    def wait(self, limit_s: float) -> dict[str, Any] | None:
        """Returns None when it ended well, else how it did; a signal handler may raise.

        "end": failed (a system call, with "errno"), truncated, stalled, damaged (with "wanted_sum"
        and "seen_sum"), closed, or late: the limit is over, and the transfer goes on. "operation"
        (read or write), "offset_bytes" and "size_bytes" say what of the file it is about; the fault
        may be an earlier request's of the block.
        """

def direct_alignment(fd: int) -> int:
    """What direct I/O of this file goes by; 0: it has none; -1: the kernel does not say."""

def file_system_type(fd: int) -> int:
    """The magic number of statfs(2). Raises OSError."""

def crc32c_ways() -> list[str]:
    """The ways to make a CRC32C that run on this CPU, the one that is taken first."""

def crc32c(ptr: int, size_bytes: int, way: str) -> int:
    """A test's view of the checksum."""

class Process:
    """A process that runs, to ask later whether it has ended; one of pid 0 never does.

    Asking it costs a descriptor, or else a look into /proc. Raises OSError when there is none left.
    """

    def __init__(self, pid: int, with_descriptor: bool = True) -> None: ...
    def has_ended(self) -> bool:
        """True also while it is a zombie, and when another process has its pid."""

class PeerHeap:
    """A peer process's heap, mapped here until the object dies."""

    @staticmethod
    def open(pid: int, fd: int, capacity_bytes: int, token: int) -> PeerHeap:
        """Opens /proc/<pid>/fd/<fd>. Raises OSError when it cannot, or when it is another heap."""
    @property
    def base_ptr(self) -> int: ...
    @property
    def capacity_bytes(self) -> int: ...

class Request:
    """A posted send or receive. Its buffer must stay alive until it is done."""

    def wait(self, timeout_ms: int = -1) -> int:
        """Status; after `timeout_ms` that of a timeout, with the message still under way.

        Negative: until the communicator's own timeout, which is a fault.
        """
    def withdraw(self) -> bool:
        """Takes a receive back, unless a message has matched it.

        True: it is done now, without a source, and nothing comes into its buffer.
        """
    def done(self) -> bool: ...
    def status(self) -> int: ...
    @property
    def source(self) -> int:
        """A finished receive: the rank that sent."""
    @property
    def dtype(self) -> str:
        """A finished receive: the type of the message's elements."""
    @property
    def size_bytes(self) -> int:
        """A finished receive: the size of the message."""

ADAMW_BLOCK_ELEMS: int
"""Chunks of a bucket begin at multiples of this many elements."""
MOMENT_BLOCK_ELEMS: int
"""Elements that share an exponent where moments have 8 bits (optimizer/block_moments.h)."""
ADAMW_FLAGS: dict[str, int]
"""Bits of a group's flags: l2, amsgrad, maximize; and of a parameter's: active."""
GRAD_NORM_WORDS: int
"""int64 words of a norm that is added up exactly (ringcomm/optimizer/grad_norm.h)."""
GRAD_NORM_KINDS: dict[str, int]
"""Code of each norm: l2, l1, inf."""

class AdamWShard:
    """One rank's shard of a bucket; addresses, 0: null (ringcomm/optimizer/adamw.h)."""

    def __init__(
        self,
        *,
        segments: int,
        segment_count: int,
        factors: int,
        bucket_elems: int,
        begin: int,
        elems: int,
        master: int,
        remainder: int,
        exp_avg: int,
        exp_avg_sq: int,
        max_exp_avg_sq: int,
        params: int,
        param_dtype: int,
        stochastic: bool,
        seed: int,
        bucket: int,
        eight_bits: bool = ...,
    ) -> None: ...

def advise_huge_pages(ptr: int, size_bytes: int) -> None:
    """Asks for huge pages under memory that is not touched yet; a hint."""

def chunk_elems(bucket_elems: int, world: int) -> int:
    """Elements of a rank's chunk; the last chunks may be shorter, or empty."""

def prepare_adamw(
    *, control: int, hyper: int, group: int, active: int, step: int, factors: int, params: int
) -> None:
    """Begins a step: advances the step numbers, or counts a skipped step, and fills the factors."""

def adamw_shard_bytes(shard: AdamWShard) -> bytes:
    """A shard's description, for a copy in device memory."""

def adamw_table_bytes(
    *, control: int, hyper: int, group: int, active: int, step: int, factors: int, params: int
) -> bytes:
    """Returns the table that `prepare_adamw` takes, for a copy in device memory."""

def adamw_shard(shard: AdamWShard, grad: int, grad_dtype: int) -> None:
    """Updates a shard from its chunk's gradient."""

def grad_norm(grad: int, dtype: int, elems: int, kind: int, words: int) -> None:
    """Overwrites the words with the norm of a chunk's gradient."""

class CallLock:
    """Held by whoever runs a call; not reentrant. Ctrl-C ends the wait for it."""

    def __enter__(self) -> None: ...
    def __exit__(self, *error: object) -> None: ...
    def acquire(self, timeout: float) -> bool: ...
    def release(self) -> None: ...

class Comm:
    """One rank's end of a communicator: a region of the heap, connected to the peers' regions.

    In a forked child it is the parent's: it does nothing there.
    """

    turn: CallLock
    """Calls on plain tensors take it themselves, all others are made by who holds it."""

    def __init__(
        self,
        heap: Heap,
        rank: int,
        world: int,
        segment_bytes: int = 0,
        slots: int = 4,
        timeout_ms: int = 1_800_000,
        records: int = 0,
        name: str = "",
        single_copy: bool = True,
        sum_blocks: int = 0,
    ) -> None:
        """`records`: how many calls the flight recorder keeps, under `name`. `sum_blocks`: ranks
        of a block in which reductions are made, 0: all in rank order."""
    @property
    def single_copy(self) -> bool:
        """True where all ranks want to copy out of each other's processes, and may."""
    @property
    def region_offset_bytes(self) -> int: ...
    @property
    def region_bytes(self) -> int: ...
    @property
    def segment_bytes(self) -> int: ...
    @property
    def slots(self) -> int: ...
    timeout_ms: int
    @property
    def proof(self) -> int:
        """Random; stands in the region, and in this rank's handle."""
    def connect(self, peers: list[tuple[Heap | PeerHeap, int, int, int]]) -> None:
        """Per rank: its heap as mapped here, region offset in it, pid (0: a thread of ours), proof.

        The heaps stay mapped until close(). Raises OSError when no descriptor is left, and
        ValueError, naming the rank, when no region of that rank lies there.
        """
    def meet(self, members: int) -> None:
        """Says in the region whom this rank has met; `members`, not 0, stands for all handles."""
    def activate(self) -> None:
        """All ranks are connected: collectives may run.

        Raises ValueError, naming the rank, when a peer has met others.
        """
    def chosen(self, algorithm: int) -> int:
        """Code of the algorithm that a large call runs: "auto" is resolved."""
    @property
    def geometry(self) -> dict[str, int]:
        """The region's layout: world, channels, slots, segment_bytes, staging_bytes."""
    def rank_table(self, scratch: int) -> bytes:
        """Returns the RankTable of a kernel in Triton's interpreter, with `scratch` for its state.

        Raises ValueError for more than 64 ranks.
        """
    def health(self, peer: int) -> int:
        """Status of the peer's process: 0 while it lives."""
    def has_closed(self, peer: int) -> bool:
        """True once the peer has closed the communicator."""
    def is_thread(self, peer: int) -> bool:
        """True when the peer is a thread of this process, until this rank closes."""
    def set_left(self, left: bool) -> None:
        """Ends the waits of ranks that are threads of this process for this one, while true."""
    @property
    def awaited(self) -> int:
        """The rank that a call of this one has waited for, for a while, or -1; a hint."""
    @property
    def arrivals(self) -> int:
        """A number that changes when a peer publishes something to this rank, or acknowledges."""
    @property
    def has_messages(self) -> bool:
        """True while a send or a receive of this rank is under way."""
    def all_reduce_plain(self, tensor: object, op: object, algorithm: object, /) -> int:
        """Reduces a plain tensor; returns `NOT_PLAIN`, and communicates nothing, for another."""
    def reduce_scatter_plain(
        self, output: object, input: object, op: object, algorithm: object, /
    ) -> int: ...
    def all_gather_plain(self, output: object, input: object, algorithm: object, /) -> int: ...
    def barrier_plain(self) -> int: ...
    def all_reduce(
        self,
        in_ptr: int,
        out_ptr: int,
        elems: int,
        dtype: int,
        op: int,
        factor: float,
        algorithm: int,
        /,
    ) -> int: ...
    def reduce(
        self,
        in_ptr: int,
        out_ptr: int,
        elems: int,
        dtype: int,
        op: int,
        factor: float,
        root: int,
        /,
    ) -> int: ...
    def reduce_scatter(
        self,
        in_ptr: int,
        out_ptr: int,
        out_elems: int,
        dtype: int,
        op: int,
        factor: float,
        algorithm: int,
        /,
    ) -> int: ...
    def reduce_scatter_list(
        self,
        in_ptrs: list[int],
        elems: list[int],
        out_ptr: int,
        dtype: int,
        op: int,
        factor: float,
        /,
    ) -> int: ...
    def reduce_scatter_partial(
        self,
        in_ptrs: list[int],
        elems: list[int],
        out_ptr: int,
        dtype: int,
        op: int,
        factor: float,
        /,
    ) -> int:
        """As `reduce_scatter_list`, but results are of type `accumulator(dtype)`, and unfinished.

        PREMUL_SUM has its factors applied, AVG is not divided. `out_ptr` lies apart from the inputs
        unless both have one dtype.
        """
    def reduce_partial(
        self,
        in_ptr: int,
        out_ptr: int,
        elems: int,
        dtype: int,
        op: int,
        factor: float,
        root: int,
        /,
    ) -> int:
        """The same for one receiver; other ranks' `out_ptr` is not touched."""
    def reduce_scatter_norm(
        self,
        grads: int,
        bucket_elems: int,
        dtype: int,
        op: int,
        out: int,
        accumulate: bool,
        kind: int,
        words: int,
        algorithm: int,
        step_bytes: int,
        tag: int,
    ) -> int:
        """Reduces a bucket in the heap into this rank's FP32 chunk, with the norm of its chunk.

        ``words`` 0: without. ``step_bytes``: gradients that the whole step reduces, or 0. ``tag``:
        see `grad_tag`; equal on all ranks; 0: none.
        """
    def adamw_all_gather(
        self, shard: AdamWShard, grad: int, grad_dtype: int, algorithm: int, step_bytes: int
    ) -> int:
        """Updates the shards; every rank's bucket in the heap ends with all new parameters.

        ``step_bytes``: parameters that the whole step updates, or 0.
        """
    def reduce_scatter_adamw_all_gather(
        self,
        shard: AdamWShard,
        grads: int,
        grad_dtype: int,
        op: int,
        algorithm: int,
        step_bytes: int,
        tag: int,
    ) -> int:
        """Both of the above in one pass, without a norm."""
    def all_gather(
        self, in_ptr: int, out_ptr: int, in_bytes: int, dtype: int, algorithm: int, /
    ) -> int: ...
    def all_gather_list(
        self, in_ptr: int, out_ptrs: list[int], sizes_bytes: list[int], dtype: int, /
    ) -> int: ...
    def broadcast(self, ptr: int, size_bytes: int, dtype: int, root: int, /) -> int: ...
    def gather(
        self, in_ptr: int, size_bytes: int, out_ptrs: list[int], dtype: int, root: int, /
    ) -> int: ...
    def scatter(
        self, in_ptrs: list[int], out_ptr: int, size_bytes: int, dtype: int, root: int, /
    ) -> int: ...
    def all_to_all(
        self,
        in_ptrs: list[int],
        in_sizes_bytes: list[int],
        out_ptrs: list[int],
        out_sizes_bytes: list[int],
        dtype: int,
        /,
    ) -> int: ...
    def barrier(self) -> int: ...
    def post_send(
        self, ptr: int, size_bytes: int, peer: int, tag: int, dtype: int, /
    ) -> Request: ...
    def post_recv(self, ptr: int, size_bytes: int, peer: int, tag: int, dtype: int, /) -> Request:
        """`peer` -1 receives from any rank; -2, too, and goes on when all of them have gone.

        The latter is for a message that may also come by another engine: see `Request.withdraw`.
        """
    def drive_in_background(self) -> None:
        """From here on a thread drives requests that nobody waits for (isend, irecv)."""
    def fault(self) -> dict[str, Any] | None:
        """Returns the origin of this communicator's fault, or None.

        kind ("timeout", "peer_lost", "peer_closed", "mismatch", "aborted", "interrupted"), op,
        rank (who reports), peer (about whom; -1: none), step, wanted, seen, waiting_for,
        waited_ms, mine, theirs, reason; sequence and their_sequence, the numbers of the two calls
        (0: none), and message, whether they count messages; my_call and their_call: collective,
        dtype, op, root, algorithm and kernels by their codes, and match_bytes.
        """
    def record_begin(self, words: tuple[int, int, int, int]) -> None:
        """Records a collective of another engine, which it is about to number; see `call_words`."""
    def record_end(self, status: int) -> None: ...
    def record_around(self, words: tuple[int, int, int, int]) -> int:
        """Records a call that is made of the next ones here; returns its number.

        All ranks must do so alike, since it counts as a call.
        """
    def record_around_end(self, number: int, status: int) -> None: ...
    def recorded(self, rank: int, most: int = ...) -> bytes:
        """The flight recorder of a rank as it is now (ringcomm/comm/recorder/records.py reads it).

        Of more than ``most`` records of a kind the newest. The header's layout, rank and world are
        what this rank knows of them, whatever the other one's memory says.
        Empty when nothing is recorded, the rank is not connected, or this one has closed.
        """
    def abort(self, reason: str) -> None: ...
    @property
    def aborted(self) -> bool: ...
    def close(self) -> None: ...

class Allocator:
    """Offsets of blocks in one range: best fit, neighbours merged when they are freed."""

    def __init__(self, size_bytes: int) -> None: ...
    def allocate(self, size_bytes: int, align: int) -> int | None:
        """The offset of a block, or None when there is no room."""
    def free(self, offset: int) -> None: ...
    @property
    def used_bytes(self) -> int: ...
    @property
    def largest_free_bytes(self) -> int: ...

class Driver:
    """The CUDA driver's entry points for launches and copies; RuntimeError when there is none."""

    def __init__(self, library: str) -> None: ...
    def has_passed(self, event: int) -> bool:
        """True if the event has passed; allowed while another thread captures a graph.

        Raises:
            RuntimeError: the driver reports an error.
        """

class DeviceRecorder:
    """The flight recorder of a rank on a device.

    Tracks are 0 for collectives and 1 for messages; numbers count the calls of a track from 1, and
    a collective of several launches as many.
    """

    def __init__(self, heap: Heap, rank_of: tuple[int, int], records: int, name: str) -> None:
        """`rank_of`: rank, world. `records`: of each track, 1 or more. Raises OSError."""

    @property
    def offset_bytes(self) -> int:
        """The place in the heap."""
    def set_world_id(self, world_id: int) -> None: ...
    def release(self) -> None:
        """Gives the block back; nothing is recorded from here on."""
    def watch(self, host_page: int) -> None:
        """Calls that end once a kernel has given up there, or after `stop`, may not be done."""
    def stop(self) -> None: ...
    def unlist(self) -> None:
        """`ringcomm trace --pid` does not find it any more."""
    def withdraw(self) -> None:
        """The last call was not launched."""
    def enqueue_triton(
        self, words: tuple[int, int, int, int], channels: int, captured: bool
    ) -> None:
        """Records a collective of Triton's kernels; see `call_words`."""
    def enqueued(self, track: int) -> int:
        """The number of the last call."""
    def seen_completed(self, track: int, first: int, last: int) -> None:
        """These calls are done now; those that have failed stay so."""
    def seen_begun(self, sequence: int) -> None:
        """The kernels' count of collectives is this; says nothing once a graph was captured."""
    def seen_failed(self, track: int, number: int, status: int, peer: int) -> None:
        """A call failed; with a collective all behind it did, and those before are done."""
    def numbers_of(self, sequence: int) -> list[int]:
        """Collectives that a kernel may number so; newest first."""

class DeviceComm:
    """One rank's end on a device: calls become launches on `stream`.

    The calls have the signatures of those of `Comm` and return 0. A call with peers is prepared:
    for each of its launches ask `next`, then `launch`. They raise ValueError for what the device
    cannot do, and RuntimeError with the driver's reason when it refuses a launch. Pointers are
    device addresses.
    """

    def __init__(
        self,
        driver: Driver,
        rank_of: tuple[int, int],
        staging: tuple[int, int, int],
        extra: tuple[int, int],
        timeout_ms: int,
        family: int,
        find_kernel: Callable[[str, str], int],
    ) -> None:
        """`rank_of`: rank, world. `staging`: channels, slots, segment_bytes. `extra`: packet_bytes,
        copy_bytes. `find_kernel(unit, name)` gives a loaded CUfunction."""

    stream: int
    timeout_ms: int
    @property
    def region_bytes(self) -> int:
        """The size of the rank's part of its device heap."""
    @property
    def words_bytes(self) -> int:
        """The part of it that `words` initialises; behind it nothing needs to be."""
    @property
    def table_offset_bytes(self) -> int: ...
    @property
    def table_ptr(self) -> int:
        """The table's address on the device; 0 before `table` was called."""
    def chosen(self, algorithm: int) -> int:
        """As `Comm.chosen`."""
    @property
    def geometry(self) -> dict[str, int]:
        """As `Comm.geometry`."""
    @property
    def segment_bytes(self) -> int: ...
    @property
    def slots(self) -> int: ...
    @property
    def channels(self) -> int: ...
    def words(self) -> bytes: ...
    def set_window(self, own_ptr: int, all_ptr: int, size_bytes: int) -> bool:
        """Gives the rank a multicast window, before `table`; False: it is too small for the world
        and its channels."""
    def table(
        self,
        regions: list[int],
        heaps: list[int],
        heap_bytes: list[int],
        host_page: int,
        rings: list[list[int]],
    ) -> bytes:
        """Returns the bytes for `table_offset_bytes`; from here on calls may be prepared."""
    def activate(self, host_page: int) -> None:
        """`host_page`: HOST_PAGE_BYTES of zeros that host and device share; 0 before they go."""
    def set_recorder(self, recorder: DeviceRecorder) -> None:
        """Records all calls from here on."""
    @property
    def sequence_offset_bytes(self) -> int:
        """The place in the region of the kernels' count of collectives (8 bytes)."""
    def farewell_offset_bytes(self, writer: int) -> int:
        """Returns the place in a region of the farewell of `writer` (4 bytes)."""
    @property
    def message_channels(self) -> int:
        """Blocks of a message."""
    def limit_message_channels(self, most: int) -> None:
        """Blocks of a message; equal on all ranks, before the first message."""
    def next(self) -> bool:
        """Prepares the next launch of the call, behind the copies before it; False: it has none."""
    def withdraw(self) -> None:
        """The launch that `next` prepared is not made, nor is what follows it in its call."""
    @property
    def prepared_kind(self) -> tuple[int, int]:
        """Kernel and blocks of the prepared call; calls of equal kinds can share a launch."""
    @property
    def raised(self) -> bool:
        """Tells whether a kernel of this rank gave up."""
    def fault(self) -> dict[str, Any] | None: ...
    def request_abort(self) -> None: ...
    def mark_lost(self, peer: int, lost: bool = True) -> None: ...
    def all_reduce(
        self,
        in_ptr: int,
        out_ptr: int,
        elems: int,
        dtype: int,
        op: int,
        factor: float,
        algorithm: int,
    ) -> int: ...
    def reduce(
        self, in_ptr: int, out_ptr: int, elems: int, dtype: int, op: int, factor: float, root: int
    ) -> int: ...
    def reduce_scatter(
        self,
        in_ptr: int,
        out_ptr: int,
        elems: int,
        dtype: int,
        op: int,
        factor: float,
        algorithm: int,
    ) -> int: ...
    def reduce_scatter_list(
        self,
        in_ptrs: list[int],
        in_elems: list[int],
        out_ptr: int,
        dtype: int,
        op: int,
        factor: float,
    ) -> int: ...
    def prepare_adamw(self, table: int) -> int:
        """As the host's; `table` is the device's address of `adamw_table_bytes`."""
    def adamw_shard(self, shard: AdamWShard, address: int, grad: int, grad_dtype: int) -> int:
        """As the host's; `address` is the device's of `adamw_shard_bytes`."""
    def grad_norm(self, grad: int, dtype: int, elems: int, kind: int, words: int) -> int:
        """Adds to the words, which the caller has zeroed."""
    def encode_wire(self, wire: int, in_ptr: int, dtype: int, out_ptr: int, elems: int) -> int:
        """As the host's. Codes that begin at a multiple of 4 bytes are stored by words."""
    def sum_wires(
        self,
        wire: int,
        in_ptr: int,
        count: int,
        stride_bytes: int,
        out_ptr: int,
        dtype: int,
        elems: int,
        divide_by: int = 0,
    ) -> int:
        """As the host's; `count` arrays of codes are `stride_bytes` apart."""
    def copy_rows(
        self,
        entries_ptr: int,
        entry_words: int,
        count: int,
        base_ptrs: list[int],
        row_bytes: int,
        out_ptr: int,
    ) -> int:
        """As the host's; the table of entries and all rows are in memory that the device maps."""
    def sum_rows(
        self,
        entries_ptr: int,
        base_ptrs: list[int],
        tokens: int,
        k: int,
        weights_ptr: int,
        dtype: int,
        elems: int,
        out_ptr: int,
    ) -> int: ...
    def scale_rows(
        self,
        entries_ptr: int,
        count: int,
        base_ptrs: list[int],
        weights_ptr: int,
        with_ptr: int,
        dtype: int,
        elems: int,
        out_ptr: int,
        dots_ptr: int,
    ) -> int: ...
    def reduce_scatter_norm(
        self,
        grads: int,
        bucket_elems: int,
        dtype: int,
        op: int,
        out: int,
        accumulate: bool,
        kind: int,
        words: int,
        algorithm: int,
        tag: int,
    ) -> int:
        """As the host's, but adds to the words, which the caller has zeroed."""
    def adamw_all_gather(
        self, shard: AdamWShard, address: int, grad: int, grad_dtype: int, algorithm: int
    ) -> int: ...
    def reduce_scatter_adamw_all_gather(
        self,
        shard: AdamWShard,
        address: int,
        grads: int,
        grad_dtype: int,
        op: int,
        algorithm: int,
        tag: int,
    ) -> int: ...
    def all_gather(
        self, in_ptr: int, out_ptr: int, size_bytes: int, dtype: int, algorithm: int
    ) -> int: ...
    def all_gather_list(
        self, in_ptr: int, out_ptrs: list[int], out_bytes: list[int], dtype: int
    ) -> int: ...
    def broadcast(self, ptr: int, size_bytes: int, dtype: int, root: int) -> int: ...
    def gather(
        self, in_ptr: int, size_bytes: int, out_ptrs: list[int], dtype: int, root: int
    ) -> int: ...
    def scatter(
        self, in_ptrs: list[int], out_ptr: int, size_bytes: int, dtype: int, root: int
    ) -> int: ...
    def all_to_all(
        self,
        in_ptrs: list[int],
        in_bytes: list[int],
        out_ptrs: list[int],
        out_bytes: list[int],
        dtype: int,
    ) -> int: ...
    def barrier(self) -> int: ...
    def messages(
        self,
        send_ptrs: list[int],
        send_bytes: list[int],
        readers: int,
        receive_ptrs: list[int],
        receive_bytes: list[int],
        senders: int,
        tag: int,
    ) -> int:
        """Lists by rank; `readers` and `senders` say as bits which entries count."""

def launch(ranks: list[DeviceComm], stream: int) -> None:
    """Launches the prepared calls of ranks on the current device, all in one grid."""

def abort_reason(reason: str) -> bytes:
    """Returns the bytes for REASON_OFFSET_BYTES of a control page that is to be aborted."""

def fault_in_page(page: bytes, owner: int, world: int) -> dict[str, Any] | None:
    """The fault record in the control page of rank `owner`; None while its abort word is down."""

def recorder_bytes(records: int) -> int:
    """Returns the size of a flight recorder of so many records of each track."""

def recorder_snapshot(
    block_ptr: int, records: int, rank_of: tuple[int, int], world_id: int, most: int = ...
) -> bytes:
    """As `Comm.recorded`, of the recorder of a rank on a device at this address."""

CONTROL_PAGE_BYTES: int
ABORTED_OFFSET_BYTES: int
REASON_OFFSET_BYTES: int
HOST_PAGE_BYTES: int
DEVICE_THREADS: int
MESSAGE_CHANNELS: int
MAX_RANKS_PER_LAUNCH: int
MAX_DEVICE_WORLD: int
