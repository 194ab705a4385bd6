"""Records of an analysis, frozen dataclasses that mirror the JSON of ``ddltrace analyze --json``.

Times are microseconds (``_us``), shares are fractions from 0 to 1, bandwidths are gigabits per
second (``_gbps``). Values that the trace does not contain are None, never zero.

``docs/report-reference.md`` defines the times that the records name (compute, communication,
overlap, exposed, waiting, transfer, idle, ...) in words and in columns of a trace; its text is in
``docs/generate_report_reference.py``.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, field, fields
from typing import TYPE_CHECKING, Any, Final

from ddltrace.tracer.optional_packages import require_extra

if TYPE_CHECKING:
    import pandas as pd

SCHEMA: Final = "ddltrace.analysis/1"

CATEGORIES: Final = ("compute", "transfer", "wait", "update", "data", "copy", "host", "idle")
"""Categories of pieces of the critical path, in the order of `PathTotals`."""


@dataclass(frozen=True)
class TraceFacts:
    """What was recorded.

    Attributes:
        name: The trace's name.
        world_size: Number of ranks of the job.
        ranks: Ranks with events in the trace.
        hosts: Names of their hosts.
        steps: Completed steps that were analyzed.
        source: ``ddltrace``, or the imported format.
        status: ``complete``, ``partial`` or ``running``.
        exit_status: Exit status of the job; 128 + n if signal n killed it; null if it is not known.
        level: Level of detail of the trace.
        command: The job's command line.
        events: Events analyzed.
        dropped: Events that did not fit in the tracer's buffer.
        lost_bytes: Bytes of event files that could not be read.
        notes: Limitations of the trace that a reader must know.
        suspected_communication: Kernels that count as computation although they are named like
            communication, and how often they ran, at most 20.
    """

    name: str
    world_size: int
    ranks: tuple[int, ...]
    hosts: tuple[str, ...]
    steps: int
    source: str
    status: str
    exit_status: int | None
    level: str
    command: tuple[str, ...]
    events: int
    dropped: int
    lost_bytes: int
    notes: tuple[str, ...]
    suspected_communication: dict[str, int] = field(default_factory=dict)


@dataclass(frozen=True)
class RankClockFacts:
    """The offset of a rank's clock from rank 0's clock.

    Attributes:
        rank: Global rank.
        offset_us: Offset that is added to the rank's times, at its first event.
        drift_ppm: Change of the offset, microseconds per second of the rank's clock.
        residual_us: Bound on the remaining error; None if it is unknown.
        method: How the offset was found: ``shared clock``, ``exchanges with rank 0``,
            ``exchanges with rank 0 and messages``, ``messages``, ``wall clocks`` or ``none``.
    """

    rank: int
    offset_us: float
    drift_ppm: float
    residual_us: float | None
    method: str


@dataclass(frozen=True)
class ClockFacts:
    """How clocks were aligned. Differences across ranks below `max_residual_us` are unsure.

    Attributes:
        method: The ranks' methods as in `RankClockFacts.method`, except for shared clocks.
        max_residual_us: The largest residual of all ranks; None if the residual of one rank is
            unknown.
        ranks: By rank.
    """

    method: str
    max_residual_us: float | None
    ranks: tuple[RankClockFacts, ...]


@dataclass(frozen=True)
class StepTimes:
    """Distribution of times of the steady steps; None without steps.

    Attributes:
        p50: Median.
        p95: 95th percentile.
        mean: Mean.
    """

    p50: float | None
    p95: float | None
    mean: float | None


@dataclass(frozen=True)
class IdleShares:
    """Idle time by cause, over all ranks and steady steps, as shares of their time.

    The causes are those of `IdleRow`; all but `in_message_share` sum to `Summary.idle_share`.

    Attributes:
        data_share: Share of `IdleRow.data_us`.
        other_rank_share: Share of `IdleRow.other_rank_us`.
        message_share: Share of `IdleRow.message_us`.
        host_share: Share of `IdleRow.host_us`.
        stopped_share: Share of `IdleRow.stopped_us`.
        unknown_share: Share of `IdleRow.unknown_us`.
        in_message_share: Share of `IdleRow.in_message_us`.
    """

    data_share: float | None
    other_rank_share: float | None
    message_share: float | None
    host_share: float | None
    stopped_share: float | None
    unknown_share: float | None
    in_message_share: float | None


@dataclass(frozen=True)
class Summary:
    """The run over its steady steps and all ranks.

    Each share is a sum of times over the sum of the durations of steps, both over all ranks and
    their steady steps.

    Attributes:
        step_us: Wall times of the steps, from first start to last end over all ranks. If ranks are
            not in step with each other, wall times of consecutive steps overlap.
        rank_step_us: Durations of the steps on each rank, which determine the throughput.
        overlap_ratio: Sum of overlap over sum of communication.
        compute_share: Share of compute.
        exposed_comm_share: Share of exposed communication.
        copy_share: Share of copies outside of compute and communication.
        idle_share: Share of idle time; with the three above it sums to 1.
        sync_overhead_share: Share of the time in which a message waits for its release and the
            rank does not compute (SketchDLC's synchronization overhead).
        update_overhead_share: Share of the optimizer's update (SketchDLC's update overhead).
        data_share: Share of data loading.
        idle: Causes of the ranks' idle time.
        steps: Number of steps that the summary covers; 0 for the whole traced window, without
            steps.
        warmup_steps: Number of completed steps that were left out.
        rule: How warm-up steps were distinguished from steady steps.
    """

    step_us: StepTimes
    rank_step_us: StepTimes
    overlap_ratio: float | None
    compute_share: float | None
    exposed_comm_share: float | None
    copy_share: float | None
    idle_share: float | None
    sync_overhead_share: float | None
    update_overhead_share: float | None
    data_share: float | None
    idle: IdleShares
    steps: int
    warmup_steps: int
    rule: str


@dataclass(frozen=True)
class RankRow:
    """One rank over the analyzed window: the whole trace, or the requested steps.

    Attributes:
        rank: Global rank.
        step_us_p50: Median of the durations of its own steady steps.
        step_us_p95: Their 95th percentile.
        span_us: From the first start to the last end of its device work, without unrecorded steps
            in between.
        compute_us: Compute.
        comm_us: Communication: ``wait_us + transfer_us`` where every message could be joined; None
            if its messages ended at unknown times.
        overlap_us: Overlap.
        overlap_ratio: Overlap over communication.
        exposed_comm_us: Exposed communication.
        copy_us: Copies, within `span_us`.
        copies: The same by direction, each the union of its copies; concurrent copies in several
            directions count in each.
        idle_us: `span_us` without device work.
        wait_us: Waiting: messages are in flight, and all of them wait for another rank.
        transfer_us: Transfer: a message is in flight whose ranks have all arrived.
        host_wait_us: Time in which a host thread is blocked on a message.
        data_us: Data loading.
        update_us: The optimizer's update.
        bytes_sent: Input bytes of its messages (on the wire where known); zero for receives and for
            ranks that receive from a root.
        messages: Number of messages, completed or not.
        open_messages: Number of messages that had not completed when last observed.
    """

    rank: int
    step_us_p50: float | None
    step_us_p95: float | None
    span_us: float | None
    compute_us: float | None
    comm_us: float | None
    overlap_us: float | None
    overlap_ratio: float | None
    exposed_comm_us: float | None
    copy_us: float
    copies: CopyTimes
    idle_us: float | None
    wait_us: float | None
    transfer_us: float | None
    host_wait_us: float
    data_us: float
    update_us: float
    bytes_sent: int
    messages: int
    open_messages: int


@dataclass(frozen=True)
class IdleRow:
    """Idle time of one rank by cause, over the span of its device work.

    Attributes:
        rank: Global rank.
        idle_us: Idle time as in `RankRow.idle_us`; the sum of the next six values.
        data_us: The host fetches a batch.
        other_rank_us: The host is blocked on a message that another rank has not yet entered.
        message_us: The host is blocked on another message, or a message is open that never
            completed.
        host_us: The host runs code in a step, a phase or other recorded work.
        stopped_us: No thread of the process ran: it was stopped, or suspended with its host.
        unknown_us: Nothing was recorded at that time.
        in_message_us: Not part of the idle time: time in which the rank only waits in messages, all
            of which wait for another rank.
        waits_for: The rank that it waits for most in messages; None for none.
    """

    rank: int
    idle_us: float | None
    data_us: float | None
    other_rank_us: float | None
    message_us: float | None
    host_us: float | None
    stopped_us: float | None
    unknown_us: float | None
    in_message_us: float | None
    waits_for: int | None


@dataclass(frozen=True)
class OperationOfShapes:
    """The runs of a kernel or operator on inputs of the same shapes.

    Attributes:
        shapes: Shapes such as ``[[64,3],[3]]``: one list for each input, empty for an input that is
            not a tensor. For a kernel, the inputs of the operator that launched it.
        count: How often it ran.
        total_us: Sum of its durations.
        mean_us: Mean duration.
    """

    shapes: str
    count: int
    total_us: float
    mean_us: float


@dataclass(frozen=True)
class OperationOfRank:
    """One rank's part of a kernel or operator.

    Attributes:
        rank: Global rank.
        count: Number of executions on the rank.
        total_us: Sum of its durations.
        mean_us: Mean duration.
        p95_us: 95th percentile of its durations.
    """

    rank: int
    count: int
    total_us: float
    mean_us: float
    p95_us: float


@dataclass(frozen=True)
class KernelRow:
    """One kernel, communication kernel or kind of copy, over all ranks.

    Attributes:
        name: Its name.
        kind: ``compute``, ``communication`` or ``copy``.
        count: How often it ran.
        total_us: Sum of its durations.
        mean_us: Mean duration.
        p95_us: 95th percentile of its durations.
        min_us: Shortest duration.
        max_us: Longest duration.
        share: Its part of the durations of all kernels and copies.
        per_step_us: Its time in one step of one rank, mean; None without steps.
        ranks: Its runs by rank.
        shapes: Its runs by the shapes of inputs, the longest total first, at most 16; empty where
            no shapes are known.
    """

    name: str
    kind: str
    count: int
    total_us: float
    mean_us: float
    p95_us: float
    min_us: float
    max_us: float
    share: float
    per_step_us: float | None
    ranks: tuple[OperationOfRank, ...]
    shapes: tuple[OperationOfShapes, ...] = ()


@dataclass(frozen=True)
class OperatorRow:
    """One operator, or one call of the device's runtime, over all ranks.

    Attributes:
        name: Its name.
        kind: ``operator`` or ``runtime``.
        count: How often it ran.
        total_us: Sum of its durations.
        self_us: The same without nested operators and runtime calls.
        mean_us: Mean duration.
        p95_us: 95th percentile of its durations.
        device_us: Durations of the kernels and copies launched in it.
        self_device_us: The same without those launched by another operator in it.
        per_step_us: Its time in one step of one rank, mean; None without steps.
        ranks: Its runs by rank.
        shapes: As in `KernelRow`.
    """

    name: str
    kind: str
    count: int
    total_us: float
    self_us: float
    mean_us: float
    p95_us: float
    device_us: float
    self_device_us: float
    per_step_us: float | None
    ranks: tuple[OperationOfRank, ...]
    shapes: tuple[OperationOfShapes, ...] = ()


@dataclass(frozen=True)
class LaunchRow:
    """How one rank's host launched its device work, with the limits of Holistic Trace Analysis.

    Attributes:
        rank: Global rank.
        launches: Kernels and copies whose launching call is known.
        short_kernels: Launches whose work took less time than the call, among calls of up to 50 us.
        slow_calls: Launches whose call took more than 50 us.
        long_delays: Launches whose work began more than 100 us after the call.
        call_us: Mean time of a call.
        call_us_p95: 95th percentile.
        delay_us: Mean time from the end of the call to the start of the work, at least 0.
        delay_us_p50: Median.
        delay_us_p95: 95th percentile.
    """

    rank: int
    launches: int
    short_kernels: int
    slow_calls: int
    long_delays: int
    call_us: float
    call_us_p95: float
    delay_us: float
    delay_us_p50: float
    delay_us_p95: float


@dataclass(frozen=True)
class LaunchGaps:
    """Launches of device work in the steady steps, and the gaps that they leave on the device.

    A launch gap is a time of at most 1 ms in which the device idles for the host's code, which
    prepares the next launch. Values are means over ranks and steps.

    Attributes:
        launches: Kernels, copies and messages launched in a step of one rank.
        launches_per_s: The same per second.
        gap_us: Launch gaps in a step of one rank.
        gap_share: Their share of the time.
        gap_share_of_host: Their share of the time in which a device idles for the host's code
            (`IdleRow.host_us`); null if there is none.
        in_phase_share_of_host: The share of the same time, in gaps of any length, that is inside of
            recorded forward and backward passes and optimizer steps.
        synchronizations: In a step of one rank, calls that wait for the device, such as
            cudaStreamSynchronize, or copies from the device to the host, whichever are more.
    """

    launches: float
    launches_per_s: float
    gap_us: float
    gap_share: float
    gap_share_of_host: float | None
    in_phase_share_of_host: float | None
    synchronizations: float


@dataclass(frozen=True)
class DeviceStepRow:
    """One step of one rank on its device's time: the work that the host launched in the step.

    Where the host runs ahead, that work runs while the host is in later steps. Work whose launch
    was not recorded, such as that launched before the recording began, is of no step here.

    Attributes:
        rank: Global rank.
        step: Number of the step in which the host launched the work.
        lag_us: From the launch of its first work to the begin of that work.
        period_us: From the begin of its first work to that of the next step; null for the last.
        compute_us: Union of its kernels.
        comm_us: Union of its messages.
        overlap_us: Time in both.
        copy_us: Union of its copies.
    """

    rank: int
    step: int
    lag_us: float
    period_us: float | None
    compute_us: float
    comm_us: float
    overlap_us: float
    copy_us: float


@dataclass(frozen=True)
class StreamRow:
    """One stream of one rank: causes of its idle time, and the length of its queue.

    Definitions are those of Holistic Trace Analysis 0.5.0, over all steps; `IdleRow` has ours.

    Attributes:
        rank: Global rank.
        stream: Its lane.
        works: Number of kernels and copies.
        busy_us: Sum of their durations.
        host_wait_us: Gaps before works that were launched after the end of the work before. Works
            whose launch is not recorded count, as in HTA, as launched when the first event of the
            file began.
        kernel_wait_us: Other gaps shorter than 30 us.
        other_us: All other gaps.
        queue_mean: Works launched and not begun, mean over all changes of their number; None
            without known launches.
        queue_max: Maximum of the same number.
    """

    rank: int
    stream: str
    works: int
    busy_us: float
    host_wait_us: float
    kernel_wait_us: float
    other_us: float
    queue_mean: float | None
    queue_max: int | None


@dataclass(frozen=True)
class CopyRow:
    """Copies and fills on one rank's device in one direction.

    Attributes:
        rank: Global rank.
        direction: Start of their name, such as ``Memcpy HtoD``, or ``Memset``.
        count: Number of copies.
        bytes: Sum of their sizes, where known.
        total_us: Sum of their durations.
        gbps: Bytes divided by time, over copies of known size; None if there are none.
        mean_gbps: Mean bandwidth of a copy.
        max_gbps: The highest bandwidth of a copy.
    """

    rank: int
    direction: str
    count: int
    bytes: int
    total_us: float
    gbps: float | None
    mean_gbps: float | None
    max_gbps: float | None


@dataclass(frozen=True)
class PathTotals:
    """The critical path of a step by category; the categories sum to `total_us`, the wall.

    Attributes:
        total_us: The wall time of the step.
        compute_us: A layer, a gradient or an operator computes.
        transfer_us: A message that all its ranks have entered is transferred.
        wait_us: Waiting that is not explained by another rank's work.
        update_us: The optimizer.
        data_us: Fetching a batch.
        copy_us: A copy or fill on the device while no kernel runs.
        host_us: Host code outside of these.
        idle_us: Nothing was recorded at that time, or no thread of the process ran (its parts are
            called ``process stopped``).
    """

    total_us: float
    compute_us: float
    transfer_us: float
    wait_us: float
    update_us: float
    data_us: float
    copy_us: float
    host_us: float
    idle_us: float


@dataclass(frozen=True)
class CopyTimes:
    """Time of device copies by direction.

    Attributes:
        host_to_device_us: From the host's memory to the device.
        device_to_host_us: From the device to the host's memory.
        device_to_device_us: Within one device.
        peer_us: From one device to another.
        fill_us: Fills (memset).
        other_us: Copies whose name does not contain the direction.
    """

    host_to_device_us: float
    device_to_host_us: float
    device_to_device_us: float
    peer_us: float
    fill_us: float
    other_us: float


@dataclass(frozen=True)
class StepRow:
    """One completed step over all ranks.

    Attributes:
        step: Its number.
        start_us: Its earliest start on any rank, from the trace's origin.
        wall_us: From its earliest start to its latest end on any rank.
        ranks: Number of ranks that completed it.
        steady: Whether the summary counts it.
        overlap_ratio: Sum of overlap over sum of communication, over ranks.
        compute_share: Sum of compute over sum of the step's durations, over ranks.
        exposed_comm_share: The same share of exposed communication.
        idle_share: The same share of idle time.
        critical_path: Its critical path by category.
        copies: The copies on its critical path by direction; they sum to `copy_us` there.
    """

    step: int
    start_us: float
    wall_us: float
    ranks: int
    steady: bool
    overlap_ratio: float | None
    compute_share: float | None
    exposed_comm_share: float | None
    idle_share: float | None
    critical_path: PathTotals
    copies: CopyTimes


@dataclass(frozen=True)
class ExtraTime:
    """Extra time of one category on the critical path of a slow step, compared with its usual time.

    Attributes:
        category: One of `CATEGORIES`.
        rank: The rank on which it grew most; None if it did not grow.
        name: The layer, tensor or operation with most of this time on that rank; None without a
            name.
        us: Extra time; negative if the slow step has less than usual. All values sum to
            `SlowStep.longer_us`.
    """

    category: str
    rank: int | None
    name: str | None
    us: float


@dataclass(frozen=True)
class SlowStep:
    """One steady step that took much longer than the others.

    Attributes:
        step: Its number.
        wall_us: From its earliest start to its latest end on any rank.
        longer_us: Difference from the median of the steady steps.
        score: Its modified z-score; None where more than half of the steps took the same time.
        extra: The extra time by category, the largest difference first.
    """

    step: int
    wall_us: float
    longer_us: float
    score: float | None
    extra: tuple[ExtraTime, ...]


@dataclass(frozen=True)
class SlowSteps:
    """The outliers among the steady steps, the slowest first.

    Attributes:
        rule: Definition of a slow step, or why slow steps cannot be determined.
        median_us: Median wall time of the steady steps; None with too few of them.
        limit_us: Steps longer than this are slow; None with too few steady steps.
        steps: The slow steps.
    """

    rule: str
    median_us: float | None
    limit_us: float | None
    steps: tuple[SlowStep, ...]


@dataclass(frozen=True)
class CollectiveRow:
    """All collectives of one operation, group and size in the analyzed window.

    Its arrivals are the ranks' `start_ns`. Its wait on a rank is the last arrival minus that
    rank's, its transfer is the last `end_ns` minus the last arrival, at least 0. Its size is that
    of the whole vector: of an all_gather or gather the largest `out_bytes` (without one, the
    largest `bytes` times the ranks of the group), else the largest `bytes`. Algorithm bandwidth is
    8 * size / transfer, of collectives whose transfer and size are above 0. Bus bandwidth is the
    algorithm bandwidth times a factor, after NVIDIA's nccl-tests: with p ranks of the group,
    2(p - 1)/p for all_reduce, (p - 1)/p for all_gather, reduce_scatter, all_to_all, gather and
    scatter, and 1 for others. It can be compared with the bandwidth of a link.

    Attributes:
        op: Public name in ``torch.distributed``.
        group: Name of the process group.
        group_size: Its members.
        count: Number of collectives, each counted once, not once per rank.
        bytes: Input bytes of one rank in one collective (the largest, if they differ).
        algbw_gbps: Algorithm bandwidth, median over collectives.
        busbw_gbps: Bus bandwidth, median over collectives.
        wait_us: Median over collectives of the mean over ranks of their wait.
        transfer_us: Median over collectives of their transfer.
        transfer_us_p95: 95th percentile of the same.
        arrival_skew_us: Median over collectives of the last arrival minus the first.
        wait_us_total: Sum over collectives and ranks of their wait.
        transfer_us_total: Sum over collectives of their transfer.
        incomplete: Number of these collectives that lack a rank or its end; they are excluded from
            the times.
        unsure: Whether the times are below the error of the aligned clocks.
    """

    op: str
    group: str
    group_size: int
    count: int
    bytes: int | None
    algbw_gbps: float | None
    busbw_gbps: float | None
    wait_us: float | None
    transfer_us: float | None
    transfer_us_p95: float | None
    arrival_skew_us: float | None
    wait_us_total: float | None
    transfer_us_total: float | None
    incomplete: int
    unsure: bool


@dataclass(frozen=True)
class StragglerRow:
    """How often and how much a rank is the last to arrive at collectives of steady steps.

    Attributes:
        rank: Global rank.
        lateness_us: Median over the collectives to which it is last of its lateness: its arrival
            minus the median arrival of the other ranks.
        lateness_us_total: Sum of the same differences.
        collectives_last: Number of collectives to which it arrives last.
        share: The same as a fraction of the collectives in which the rank takes part (those that
            all their ranks entered, of at least two ranks).
        cause: The activity that takes this rank longer than the others: ``compute``, ``data``,
            ``copy``, ``host``, ``update``, ``stopped`` (no thread of its process ran) or
            ``network`` (transfers that it waits for); None where the trace does not contain it.
        cause_us: Extra time of the cause: the rank's median per step minus the median over the
            other ranks.
        unsure: Whether its lateness is below the error of the aligned clocks.
        late_steps: The smallest number of steady steps with 80 % of its lateness.
        steps_share: These steps as a share of all steady steps.
        late_step_us: Median over these steps of the largest lateness in the step.
        sometimes: Whether it is late in less than half of the steps. If so, `cause` and `cause_us`
            refer to these steps.
        saves_us: Upper bound on the savings per step if no rank ever waited for this one, as in
            `Savings`; None without steps.
    """

    rank: int
    lateness_us: float
    lateness_us_total: float
    collectives_last: int
    share: float
    cause: str | None
    cause_us: float | None
    unsure: bool
    late_steps: int
    steps_share: float | None
    late_step_us: float | None
    sometimes: bool
    saves_us: float | None = None


@dataclass(frozen=True)
class TensorRow:
    """Times of a parameter's gradient, from ready to updated, medians over ranks and steady steps.

    Times are from the start of the step on its rank.

    Attributes:
        name: The parameter.
        bytes: Size of its gradient.
        ready_us: When the last backward pass of the step has accumulated the gradient.
        enqueue_us: When the first message that carries the gradient is enqueued.
        start_us: When that message starts.
        complete_us: When the last message that carries the gradient has completed.
        waited_us: When the host continues after waiting for that message: the end of the wait for
            the message or, if there is none, of the first wait that ends after the message and is
            for a message that was enqueued later.
        updated_us: End of the first optimizer phase (on a device: of the optimizer's kernels) that
            ends after that message, in the same step.
        exposed_us: Its share of the exposed communication of a step, mean per rank and step:
            each exposed instant is shared equally by the messages in flight, a message's part
            by its tensors in proportion to their bytes.
        messages: Number of messages that carried the parameter or its gradient, per step and rank.
        bucket: Number of tensors in the message of its gradient (median).
    """

    name: str
    bytes: int
    ready_us: float | None
    enqueue_us: float | None
    start_us: float | None
    complete_us: float | None
    exposed_us: float | None
    messages: float
    bucket: int | None
    waited_us: float | None = None
    updated_us: float | None = None


@dataclass(frozen=True)
class P2PRow:
    """Point-to-point messages from one rank to another.

    Attributes:
        src: Sending rank.
        dst: Receiving rank.
        count: Messages.
        bytes: Sum of their sizes; null if no size is known.
        wait_us: Sum of the times for which the receiver waits for the send to begin.
        transfer_us: Sum of receive end - the later of both starts.
        unmatched: Number of these messages that were recorded on one side only.
        transfer_us_p50: Median of receive end - the later of both starts.
        transfer_us_p95: 95th percentile of the same.
        algbw_gbps: Median over messages of bytes / transfer, gigabits per second.
        unsure: Whether the transfers are below the error of the aligned clocks.
    """

    src: int
    dst: int
    count: int
    bytes: int | None
    wait_us: float | None
    transfer_us: float | None
    unmatched: int
    transfer_us_p50: float | None = None
    transfer_us_p95: float | None = None
    algbw_gbps: float | None = None
    unsure: bool = False


@dataclass(frozen=True)
class SizePoint:
    """One point of a fit: the collectives of one size.

    Attributes:
        bytes: Size of the whole vector, the n of `CostFit`.
        transfer_us: Median of their transfers.
        samples: Number of collectives.
    """

    bytes: int
    transfer_us: float
    samples: int


@dataclass(frozen=True)
class CostFit:
    """Time against size of one operation: transfer = latency + n / bandwidth.

    Attributes:
        op: Operation.
        group_size: Ranks that take part.
        backend: Backend of the group; empty if the trace does not contain it.
        samples: Number of collectives that the fit uses.
        sizes: Number of different sizes among these collectives.
        latency_us: Time of an empty collective; None if there is no fit, see `verdict`.
        alpha_us: Latency of one message of the collective if it runs as a ring.
        algbw_gbps: Algorithm bandwidth for large sizes, gigabits per second.
        busbw_gbps: The same as bus bandwidth.
        error: Median over sizes of |fit - measured| / measured.
        disturbed: Whether some of the samples overlapped compute, which slows them.
        verdict: ``fitted``, or why there is no fit.
        points: The fitted points, by size; only the most frequent sizes if there are very many.
        src: For sends and receives (`op` is ``send``): the sending rank of one link; None for
            all links together, and for collectives.
        dst: The receiving rank.
    """

    op: str
    group_size: int
    backend: str
    samples: int
    sizes: int
    latency_us: float | None
    alpha_us: float | None
    algbw_gbps: float | None
    busbw_gbps: float | None
    error: float | None
    disturbed: bool
    verdict: str
    points: tuple[SizePoint, ...] = ()
    src: int | None = None
    dst: int | None = None

    @property
    def title(self) -> str:
        """A title for the fit: ``all_reduce of 4``, ``send 0 -> 1``."""
        if self.src is not None:
            return f"{self.op} {self.src} -> {self.dst}"
        return f"{self.op}, all links" if self.op == "send" else f"{self.op} of {self.group_size}"


@dataclass(frozen=True)
class SizeBin:
    """Messages of one operation with `bytes_from` <= size < `bytes_below`; see `CollectiveRow`.

    Attributes:
        op: Operation.
        bytes_from: Smallest size of the bin.
        bytes_below: Upper limit of the bin, exclusive.
        count: Messages.
        bytes: Sum of their sizes.
    """

    op: str
    bytes_from: int
    bytes_below: int
    count: int
    bytes: int


@dataclass(frozen=True)
class TrafficRow:
    """Bytes from one rank to another.

    Attributes:
        src: Sending rank.
        dst: Receiving rank.
        bytes: How many.
        assumed: None where it was measured (sends and receives); else how the bytes of
            collectives were laid out: ``ring``, ``root`` or ``pairwise``.
    """

    src: int
    dst: int
    bytes: int
    assumed: str | None


@dataclass(frozen=True)
class DimensionRow:
    """Communication in one parallel dimension, means per rank and steady step.

    The dimension is that which a group's description or device mesh names. If it names none, as
    that of the default group, messages that carry parameters or their gradients are ``data``, and
    others ``unknown``. Messages of several dimensions can be in flight at the same time, so the
    times of the rows can sum to more than a rank's communication. In a trace without steps, the
    means are per rank over the whole trace.

    Attributes:
        dimension: ``data``, ``tensor``, ``pipeline``, ``expert``, ``context`` or ``unknown``.
        groups: Descriptions of its groups, or the names of those without one; at most 16.
        exposed_us: Time with a message in flight and without compute.
        wait_us: Time in which all its messages in flight wait for another rank.
        transfer_us: Time with a message in flight whose ranks have all arrived.
        comm_us: Time with a message in flight.
        messages: Messages that begin.
        bytes: Bytes sent, as in `RankRow.bytes_sent`; null if no size is known.
    """

    dimension: str
    groups: tuple[str, ...]
    exposed_us: float | None
    wait_us: float | None
    transfer_us: float | None
    comm_us: float | None
    messages: float
    bytes: float | None


@dataclass(frozen=True)
class PathPart:
    """A layer, tensor or operation on the critical path, over the steady steps.

    Attributes:
        category: One of `CATEGORIES`.
        rank: Where.
        name: Layer, tensor or operation; None where it has none.
        us: Mean per step.
        alone_us: Upper bound on the savings per step if this part took no time on this rank and all
            else took as long as recorded, as in `Savings`. It is small if other ranks arrive nearly
            as late, and equals `us` for a trace of one rank. It exceeds `us` if the path of some
            steps passes through another rank that ends them no earlier.
        share: Share of the steps' wall time.
    """

    category: str
    rank: int
    name: str | None
    us: float
    alone_us: float
    share: float


@dataclass(frozen=True)
class PathRank:
    """The time of one category that the critical path spends on one rank, over the steady steps.

    All of them sum to the mean step.

    Attributes:
        category: One of `CATEGORIES`.
        rank: Where.
        us: Mean per step.
    """

    category: str
    rank: int
    us: float


@dataclass(frozen=True)
class Savings:
    """Upper bounds on the savings per step, from replays of the steady steps.

    A replay keeps the order of every rank's work. A rank works for the recorded time minus the
    removed time, then waits for its message, which completes its recorded transfer time after the
    last required rank has entered it. A bound is the difference between the ends of the recorded
    and the replayed steady steps, divided by the number of steps. It is valid unless the change
    slows other work, and exact if the change removes all of the named time and nothing else
    changes. Communication that compute hides completely stays hidden in a replay without that
    compute: in this case a bound is too high. No bound is more than `step_us`.

    Time that nothing explains (unrecorded time where the trace records nothing of the host, and
    waiting for messages that could not be joined) is replayed once as work and once as waiting,
    which is in neither run then; a bound is the larger of both. In a job of which all dependencies
    are known (StragglerAnalysis), all of it is waiting, as in `IdealJob`.

    Attributes:
        step_us: The mean of `Summary.step_us`, to which the bounds refer.
        compute_us: Forward, backward and other layers take no time on any rank.
        update_us: The optimizer takes no time on any rank.
        data_us: Fetching batches takes no time on any rank.
        copy_us: Device copies outside of compute take no time on any rank.
        host_us: Host code outside of these takes no time on any rank.
        transfer_us: Every message completes as soon as its last rank has entered it.
        imbalance_us: At every collective, all ranks arrive with the first one.
    """

    step_us: float
    compute_us: float
    update_us: float
    data_us: float
    copy_us: float
    host_us: float
    transfer_us: float
    imbalance_us: float


@dataclass(frozen=True)
class RankWaiting:
    """Waiting of one rank, and waiting that began on it.

    Attributes:
        rank: Global rank.
        waits_us: How long it is blocked on messages that another rank has not yet entered.
        causes_us: Waiting of all ranks that began on this rank: the direct and propagated waiting
            of its root causes.
    """

    rank: int
    waits_us: float
    causes_us: float


@dataclass(frozen=True)
class Waiting:
    """Time in which ranks are blocked on messages that another rank has not yet entered.

    All are sums over ranks, means per steady step; without steps, of the whole trace.

    Attributes:
        total_us: All waiting: the sum of `waits_us`, and of `causes_us`, over ranks.
        p2p_us: The part of it at sends and receives.
        unknown_us: Additional time in which ranks are blocked on messages whose missing rank is
            unknown.
        ranks: By rank.
    """

    total_us: float
    p2p_us: float
    unknown_us: float
    ranks: tuple[RankWaiting, ...]

    @property
    def is_point_to_point(self) -> bool:
        """Whether most waiting is at sends and receives."""
        return self.p2p_us > self.total_us / 2


@dataclass(frozen=True)
class RootCause:
    """A root cause of waiting: an activity that took a rank longer than the ranks that waited for
    it.

    When a rank waits for another, both have worked since their last common message. The waiting is
    attributed, in proportion, to the activities (compute, update, data, copy, host code, transfers)
    on which the other rank spent more time in this period. If the other rank waited longer itself,
    that part is attributed to the causes of its waiting (delay propagation, as in Scalasca's
    root-cause analysis). All times are sums over ranks, means per steady step; without steps, of
    the whole trace.

    Attributes:
        rank: The rank on which the waiting began.
        activity: ``compute``, ``update``, ``data``, ``copy``, ``host``, or ``transfer``: a message
            to that rank took longer; ``unrecorded`` where the trace records nothing of the host:
            that rank may have worked then, or waited; ``stopped`` where no thread of its process
            ran.
        peer: The sending rank, for a transfer between two ranks; else None.
        name: Layer, operation or kernel with the largest extra time compared with other ranks; None
            without a name, for transfers and for small causes.
        direct_us: Waiting of ranks that waited for this rank.
        propagated_us: Waiting of ranks that waited for those.
        slower_us: For a transfer between two ranks: how much longer blocked receives took than is
            usual for their size on other links. This time is not waiting for a rank.
        share: Share of all waiting, direct and propagated.
        saves_us: Upper bound on the savings per step without the excess time, as in `Savings`: if
            the rank took no longer for the activity in each step than the fastest rank; if this
            explains little, if it took no longer than the ranks that wait for it; for a transfer,
            if it took the usual time. None for small causes, without steps, and if only a range is
            known.
        saves_range_us: Smallest and largest possible value of `saves_us` if they differ by more
            than 5 %: unexplained time (unrecorded time, and waiting for messages that could not be
            joined) counts as work for one and as waiting for the other. None if that time makes no
            difference.
    """

    rank: int
    activity: str
    peer: int | None
    name: str | None
    direct_us: float
    propagated_us: float
    slower_us: float
    share: float
    saves_us: float | None
    saves_range_us: tuple[float, float] | None = None

    @property
    def cost_us(self) -> float:
        """Its total cost."""
        return self.direct_us + self.propagated_us + self.slower_us

    @property
    def most_us(self) -> float:
        """The most that is known to be saved without it; 0 where nothing is known."""
        if self.saves_range_us is not None:
            return self.saves_range_us[1]
        return self.saves_us or 0.0


@dataclass(frozen=True)
class PipelineStage:
    """One stage of a pipeline, means per steady step.

    Attributes:
        rank: The rank of the stage.
        stage: Its index in the pipeline, from 0.
        step_us: Duration of the rank's step.
        work_us: Time of its computations.
        bubble_us: Time for which it is blocked on receives from its neighbours: the sum of the next
            two values, and of `forward_us` and `backward_us`.
        waiting_us: The part until the neighbour sends.
        transfer_us: The part from the send to the arrival.
        forward_us: The bubble of each microbatch at the receive from the stage before it; empty
            for the first stage.
        backward_us: The same at the receive from the stage after it; empty for the last stage.
    """

    rank: int
    stage: int
    step_us: float
    work_us: float
    bubble_us: float
    waiting_us: float
    transfer_us: float
    forward_us: tuple[float, ...]
    backward_us: tuple[float, ...]


@dataclass(frozen=True)
class Pipeline:
    """Ranks that pass microbatches on to each other in a chain, over the steady steps.

    Attributes:
        ranks: In the order of the stages.
        microbatches: Number of microbatches in a step.
        bubble_share: Sum of the stages' bubbles over the sum of their steps.
        ideal_share: The same share with equal stages and no transfers: (p - 1) / (m + p - 1) for p
            stages and m microbatches (GPipe and 1F1B).
        stages: By stage.
    """

    ranks: tuple[int, ...]
    microbatches: int
    bubble_share: float
    ideal_share: float
    stages: tuple[PipelineStage, ...]


@dataclass(frozen=True)
class NamedSlowdown:
    """How much one type of operation slows the job.

    Attributes:
        name: ``forward-compute`` and so on; all calls of the pipeline in one direction are
            ``forward-pp-comm`` or ``backward-pp-comm``.
        slowdown: S_t: the mean step with the recorded durations of these operations and the ideal
            durations of all others, over the ideal step.
    """

    name: str
    slowdown: float


@dataclass(frozen=True)
class PartSlowdown:
    """How much one data-parallel replica or one pipeline stage slows the job.

    Attributes:
        number: Its number.
        slowdown: The mean step with the recorded durations of its workers and the ideal durations
            of all others, over the ideal step.
    """

    number: int
    slowdown: float


@dataclass(frozen=True)
class WorkerSlowdown:
    """How much one worker slows the job.

    Attributes:
        rank: Its rank.
        replica: Its data-parallel rank.
        stage: Its pipeline stage.
        slowdown: S_w: the smaller one of its replica's and its stage's.
    """

    rank: int
    replica: int
    stage: int
    slowdown: float


@dataclass(frozen=True)
class StepSlowdown:
    """How much stragglers slow one step.

    Attributes:
        step: Its number.
        slowdown: The step over the ideal step, both replayed.
    """

    step: int
    slowdown: float


@dataclass(frozen=True)
class IdealJob:
    """A job compared with the same job without stragglers, as StragglerAnalysis does.

    Both are replayed from the dependencies of the operations, without the gaps in which the host
    is late. In the ideal job, all operations of one type take equally long: the mean duration of
    computations, the median transfer duration of communication. Definitions and symbols: Lin et
    al., "Understanding Stragglers in Large Model Training Using What-if Analysis", OSDI 2025.

    Attributes:
        slowdown: S: `replayed_us` over `ideal_us`.
        step_us: Mean of the recorded steps.
        replayed_us: Mean of the replayed steps.
        ideal_us: A step of the ideal job.
        discrepancy: `step_us` over `replayed_us`: far from 1, the replay does not describe the job.
        operations: By type of operation, the largest slowdown first.
        replicas: By data-parallel replica.
        stages: By pipeline stage.
        workers: By worker, the largest slowdown first.
        slowest_ranks: The 3 % of the workers (at least one) with the largest slowdown.
        m_w: M_W: the share of the slowdown that is gone when `slowest_ranks` have ideal durations;
            null if nothing slows the job.
        m_s: M_S: the share that is gone when the last pipeline stage has ideal durations.
        steps: By step.
    """

    slowdown: float
    step_us: float
    replayed_us: float
    ideal_us: float
    discrepancy: float
    operations: tuple[NamedSlowdown, ...]
    replicas: tuple[PartSlowdown, ...]
    stages: tuple[PartSlowdown, ...]
    workers: tuple[WorkerSlowdown, ...]
    slowest_ranks: tuple[int, ...]
    m_w: float | None
    m_s: float | None
    steps: tuple[StepSlowdown, ...]


@dataclass(frozen=True)
class Hang:
    """A collective that some ranks entered and that never completed, or a send or receive
    whose other side never came.

    Attributes:
        op: Operation.
        group: Process group.
        seq: Its number in the group.
        entered: Ranks that are in it.
        missing: Members that never entered it.
        unknown: Members of which it is not known whether they entered it: they left no trace, or
            their part of it was lost.
        completed: Ranks of `entered` on which it completed.
        since_us: When the last of `entered` arrived, from the trace's origin.
        waited_us: How long they had waited when the trace ends; None if unknown.
        waited_at_least: Whether they may have waited for longer than `waited_us`: the end of their
            waiting was not observed.
        timeout_us: Timeout of the group; None if unknown.
        doing: The activity of each rank, by rank, first that of missing ranks that do not hang
            elsewhere.
        called: The operation that each rank called, by rank, where they disagree.
        passed: The element type and sizes that each rank passed, by rank, where they disagree.
    """

    op: str
    group: str
    seq: int | None
    entered: tuple[int, ...]
    missing: tuple[int, ...]
    since_us: float
    waited_us: float | None
    doing: dict[int, str] = field(default_factory=dict)
    called: dict[int, str] = field(default_factory=dict)
    passed: dict[int, str] = field(default_factory=dict)
    unknown: tuple[int, ...] = ()
    completed: tuple[int, ...] = ()
    waited_at_least: bool = False
    timeout_us: float | None = None


@dataclass(frozen=True)
class Failure:
    """The rank that ended first in a job that failed.

    Attributes:
        rank: The rank.
        exit_status: Its exit status; 128 + n if signal n killed it; null if it is not known.
        at_us: Time of its end, from the trace's origin.
        before_us: How long before the next rank; None if no other ended after it.
        silent_us: Time since its last event; None without events. The last events of a killed rank
            are not written.
        doing: Its last activity.
        attempt: The job's attempt; null if the job was not restarted.
    """

    rank: int
    exit_status: int | None
    at_us: float
    before_us: float | None
    silent_us: float | None
    doing: str
    attempt: int | None = None


def stuck_ranks(hangs: Iterable[Hang]) -> frozenset[int]:
    """The ranks that are in any of them."""
    return frozenset(rank for hang in hangs for rank in hang.entered)


@dataclass(frozen=True)
class Standstill:
    """A job in which all ranks have stopped recording events, without waiting for a message.

    Attributes:
        doing: The position of each rank, by rank.
        waited_us: Time since the last event of any rank at the end of the trace; None if unknown.
    """

    doing: dict[int, str]
    waited_us: float | None


@dataclass(frozen=True)
class MemoryGrowth:
    """Memory that grows from step to step.

    Attributes:
        counter: The counter, such as ``process_memory``.
        bytes_per_step: Median slope.
        first_step: First examined step, after the warm-up.
        last_step: Last one.
        bytes: Growth between these steps, by the slope.
    """

    counter: str
    bytes_per_step: float
    first_step: int
    last_step: int
    bytes: float


@dataclass(frozen=True)
class Stop:
    """A time in which no thread of a process ran, although its counters were due every second.

    Attributes:
        last_step: The step in which the process was when it ran again; null outside of steps.
        least_us: From the first reading that was due and missing to the next reading.
        most_us: From the last reading before to the next one.
    """

    last_step: int | None
    least_us: float
    most_us: float


@dataclass(frozen=True)
class ResourceRow:
    """Resource use of one rank in its steps, from its resource counters; null if it was not
    recorded.

    Attributes:
        rank: Global rank.
        host: Its host.
        cpu_cores: Processor time of the process per second, mean.
        cpu_wait_share: Share of time in which the main thread waited for a processor, mean.
        memory_bytes: Largest resident memory of the process.
        host_cpu_share: Busy share of the host's processors, mean.
        host_busy_share: Share of samples in which at least 95 % of them were busy.
        host_memory_share: Largest used share of the host's memory.
        device_utilization: Share of time in which a kernel ran on the device, mean.
        device_memory_bytes: Largest memory of the device in use, by all processes.
        device_allocated_bytes: Largest peak of PyTorch's allocated memory in a step.
        device_reserved_bytes: Largest peak of its reserved memory.
        device_power_w: Power draw, mean, in watts.
        device_temperature_c: Largest temperature in degrees Celsius.
        device_throttled_share: Share of samples in which the device's clock was reduced because
            of power or heat.
        device_throttling: The reasons.
        growth: Memory that grows from step to step.
        stops: When no thread of the process ran; null if the counters cannot show it, or if the
            rank had several processes.
    """

    rank: int
    host: str
    cpu_cores: float | None
    cpu_wait_share: float | None
    memory_bytes: float | None
    host_cpu_share: float | None
    host_busy_share: float | None
    host_memory_share: float | None
    device_utilization: float | None
    device_memory_bytes: float | None
    device_allocated_bytes: float | None
    device_reserved_bytes: float | None
    device_power_w: float | None
    device_temperature_c: float | None
    device_throttled_share: float | None
    device_throttling: tuple[str, ...]
    growth: tuple[MemoryGrowth, ...]
    stops: tuple[Stop, ...] | None = None


_RECORDS: Final = "ddltrace run "
_OF_JOB: Final = (_RECORDS, "ddltrace compare ")


@dataclass(frozen=True)
class Finding:
    """A finding: a possible improvement, with the measurement that it is based on.

    Attributes:
        kind: Its subject: ``communication``, ``pipeline``, ``straggler``, ``data``, ``copy``,
            ``host``, ``update``, ``compute``, ``memory``, ``device``, ``processors`` or
            ``stopped``.
        saves_us: Upper bound on what a step could get shorter; 0 if the trace does not show, for
            ``memory``, ``device`` and ``processors``.
        share: The same as a share of the step.
        evidence: The measurement, one sentence.
        advice: The proposed change, one sentence.
        command: A command that tests it: an experiment, or a new recording after the change and a
            comparison. If the trace does not contain the job's command, as traces of other tools,
            only the comparison with the new trace, `after`; None if the trace was opened from
            several directories.
        unsure: Whether it is based on differences below the error of the aligned clocks.
        strategies: The strategies that `ddltrace experiment run` compares to test the advice;
            empty where no strategy tests it.
        rank: The rank whose fault it is; None for what all ranks share.
    """

    kind: str
    saves_us: float
    share: float
    evidence: str
    advice: str
    command: str | None
    unsure: bool
    strategies: tuple[str, ...] = ()
    rank: int | None = None

    @property
    def is_of_job(self) -> bool:
        """Whether `command` compares with the job after a change; it is then the same for all."""
        return self.command is not None and self.command.startswith(_OF_JOB)

    @property
    def has_saving(self) -> bool:
        """Whether the possible savings are known."""
        return self.saves_us > 0

    @property
    def instruction(self) -> str:
        """The instruction that precedes `command`."""
        if not self.is_of_job:
            return "Test it"
        is_recorded = self.command is not None and self.command.startswith(_RECORDS)
        how = "" if is_recorded else ", record it again into 'after' as this trace was recorded"
        return f"To test a change of the job{how}"


@dataclass(frozen=True)
class Joining:
    """How well messages were found on all their ranks; of steps that were asked for, theirs.

    Attributes:
        collectives: Number of collectives.
        complete: Number of collectives that were recorded and completed on all their ranks.
        partial: Number of collectives that lack the message of a member.
        open: Number of collectives that did not complete on some rank.
        mismatched: Number of collectives on whose operation or size the ranks disagree; they are
            excluded from all times.
        by_order: Whether sequence numbers were missing and the order was used.
        p2p: Number of matched pairs of sends and receives.
        p2p_unmatched: Number of unmatched sends and receives.
    """

    collectives: int
    complete: int
    partial: int
    open: int
    mismatched: int
    by_order: bool
    p2p: int
    p2p_unmatched: int


@dataclass(frozen=True)
class Mismatch:
    """A completed message on which its ranks disagree; one that did not complete is a hang.

    Attributes:
        op: Its operation; ``send`` for a send and its receive.
        group: Its group.
        seq: Its number in the group; None for a send.
        called: The operation of each rank if these differ, else empty.
        passed: Element type and shapes or bytes of each rank if these differ, else empty.
    """

    op: str
    group: str
    seq: int | None
    called: dict[int, str] = field(default_factory=dict)
    passed: dict[int, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Analysis:
    """A measured trace.

    If a trace was too long to be analyzed at once, a note in `trace` says so; `docs/scale.md` says
    which values are rounded then.

    Attributes:
        trace: What was recorded.
        clock: How clocks were aligned.
        summary: The steady steps over all ranks.
        joining: How well messages were found on all their ranks.
        ranks: One row per rank.
        steps: One row per step.
        collectives: One row per operation, group and size.
        stragglers: One row per rank that is ever the last to arrive, the worst first.
        tensors: One row per parameter, the most exposed first.
        p2p: One row per pair of ranks that send and receive.
        cost_fits: Latency and bandwidth by operation.
        message_sizes: Messages by operation and power of two of their size.
        traffic: Bytes by pair of ranks.
        dimensions: Communication by parallel dimension, the longest exposed time first.
        critical_path: The largest parts of the critical paths of the steady steps.
        critical_path_by_rank: All of these paths by category and rank; they sum to the mean step.
        savings: Possible savings per step by category; null without steps.
        pipelines: Pipelines of stages that pass microbatches on, with their bubbles.
        waiting: How long ranks wait for each other.
        root_causes: Root causes of this waiting, most expensive first. Their direct and propagated
            waiting sum to all waiting.
        hangs: Collectives that never completed, causes first.
        mismatches: Completed messages on whose operation, element type or size ranks disagree, the
            first 20; only sizes and operations unless it is a dump of the Flight Recorder.
        failure: The rank that ended first in a job that failed; null if it is not known.
        standstill: The positions of all ranks if all have stopped recording events; null if some
            continue, if the job ended, or if collectives hang.
        findings: Possible improvements, the largest savings first; before them, hosts without a
            free processor, which make the other numbers unsure.
        slow_steps: Steady steps that took much longer than the others.
        idle: Idle time of each rank by cause.
        kernels: Kernels and copies by name, the longest total first; empty unless the trace has
            single operators (level ``op``, imported profiles).
        operators: Operators and runtime calls by name, the longest self time first.
        launches: How each rank's host launched its device work.
        launch_gaps: Launches in the steady steps, and the time in which devices idle between them;
            null without recorded launches.
        device_steps: Steps of each rank on its device's time.
        streams: Each stream's idle time by cause, and its queue.
        copies: Bandwidth of copies by rank and direction.
        resources: Processor, memory and device use of each rank; empty without recorded counters.
        ideal_job: The slowdown by stragglers; null unless the trace is StragglerAnalysis's.
        rank_steps: Column name -> array over (rank, step), times in nanoseconds.
        tensor_course: Parameter -> its exposed communication, microseconds per rank and step,
            in each of at most 64 periods of the run.
    """

    trace: TraceFacts
    clock: ClockFacts
    summary: Summary
    joining: Joining
    ranks: tuple[RankRow, ...]
    steps: tuple[StepRow, ...]
    collectives: tuple[CollectiveRow, ...]
    stragglers: tuple[StragglerRow, ...]
    tensors: tuple[TensorRow, ...]
    p2p: tuple[P2PRow, ...]
    cost_fits: tuple[CostFit, ...]
    message_sizes: tuple[SizeBin, ...]
    traffic: tuple[TrafficRow, ...]
    dimensions: tuple[DimensionRow, ...]
    critical_path: tuple[PathPart, ...]
    critical_path_by_rank: tuple[PathRank, ...]
    savings: Savings | None
    pipelines: tuple[Pipeline, ...]
    waiting: Waiting
    root_causes: tuple[RootCause, ...]
    hangs: tuple[Hang, ...]
    mismatches: tuple[Mismatch, ...]
    failure: Failure | None
    standstill: Standstill | None
    findings: tuple[Finding, ...]
    slow_steps: SlowSteps
    idle: tuple[IdleRow, ...]
    kernels: tuple[KernelRow, ...] = ()
    operators: tuple[OperatorRow, ...] = ()
    launches: tuple[LaunchRow, ...] = ()
    launch_gaps: LaunchGaps | None = None
    device_steps: tuple[DeviceStepRow, ...] = ()
    streams: tuple[StreamRow, ...] = ()
    copies: tuple[CopyRow, ...] = ()
    resources: tuple[ResourceRow, ...] = ()
    ideal_job: IdealJob | None = None
    rank_steps: dict[str, Any] = field(default_factory=dict, repr=False, compare=False)
    tensor_course: dict[str, Any] = field(default_factory=dict, repr=False, compare=False)

    def to_json(self) -> dict[str, Any]:
        """The object that ``ddltrace analyze --json`` prints."""
        shown = [f.name for f in fields(self) if f.repr]
        return {"schema": SCHEMA} | {name: _plain(getattr(self, name)) for name in shown}

    def compared_dimensions(self) -> tuple[DimensionRow, ...]:
        """The rows of `dimensions` if there is something to compare: for reports.

        A job that is only data-parallel, in one group, has nothing to compare.
        """
        several = len({group for row in self.dimensions for group in row.groups}) > 1
        plain = {"data", "unknown"}
        return self.dimensions if several or {r.dimension for r in self.dimensions} - plain else ()

    def ranks_frame(self) -> pd.DataFrame:
        """One row per rank, columns as in `RankRow`, its copies' as ``copy_*``."""
        return _frame(self.ranks, RankRow)

    def steps_frame(self) -> pd.DataFrame:
        """One row per step, columns as in `StepRow`, the critical path's as ``path_*``."""
        return _frame(self.steps, StepRow)

    def rank_steps_frame(self) -> pd.DataFrame:
        """One row per rank and step: start_us, wall_us, compute_us, comm_us, ..."""
        require_extra("frames", "rank_steps_frame()")
        import pandas as pd

        columns = {}
        for name, values in self.rank_steps.items():
            if name.endswith("_ns"):
                columns[name[:-3] + "_us"] = values / 1e3
            else:
                columns[name] = values
        frame: pd.DataFrame = pd.DataFrame(columns)
        return frame

    def collectives_frame(self) -> pd.DataFrame:
        """One row per operation, group and size, columns as in `CollectiveRow`."""
        return _frame(self.collectives, CollectiveRow)

    def tensors_frame(self) -> pd.DataFrame:
        """One row per parameter, columns as in `TensorRow`."""
        return _frame(self.tensors, TensorRow)

    def stragglers_frame(self) -> pd.DataFrame:
        """One row per rank that is ever last, columns as in `StragglerRow`."""
        return _frame(self.stragglers, StragglerRow)


def _plain(value: Any) -> Any:
    if isinstance(value, tuple):
        return [_plain(item) for item in value]
    return None if value is None else asdict(value)


PREFIXES: Final = {"critical_path": "path", "copies": "copy"}
"""Records in rows -> how their columns begin in tables."""


def flat_row(row: Any) -> dict[str, Any]:
    """A record with the records in it spread out: ``critical_path`` as ``path_*``, and so on."""
    flat: dict[str, Any] = {}
    for name, value in asdict(row).items():
        if isinstance(value, dict):
            prefix = PREFIXES.get(name, name)
            flat |= {f"{prefix}_{inner}": part for inner, part in value.items()}
        else:
            flat[name] = value
    return flat


def _frame(rows: Sequence[Any], kind: type) -> pd.DataFrame:
    require_extra("frames", "a data frame of an analysis")
    import pandas as pd

    empty: dict[str, list[Any]] = {f.name: [] for f in fields(kind)}
    frame: pd.DataFrame = pd.DataFrame([flat_row(row) for row in rows] if rows else empty)
    return frame
