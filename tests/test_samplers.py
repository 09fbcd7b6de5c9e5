import gc
import json
import statistics
import sys
import time
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from jfabench.samplers import Activity, MeasureError, activities_of, attribute, make_sampler

FLUSH = "fill"


class Trace:
    """Writes a trace as CUPTI would see it: a host thread that launches and waits, a GPU that works in order."""

    def __init__(self):
        self.activities, self.host, self.gpu, self.next_id = [], 1_000, 1_000, 1
        self.stamps, self.expected = [], []

    def launch(self, name, duration, *, recorded=True, works=1):
        """One host call that starts `works` GPU activities (more than one: a CUDA graph)."""
        self.host += 5
        if recorded:
            self.activities.append(Activity("cudaLaunchKernel", False, self.host, 3, self.next_id))
        for _ in range(works):
            begin = max(self.gpu, self.host + 4)
            self.activities.append(Activity(name, True, begin, duration, self.next_id))
            self.gpu = begin + duration
        self.host += 4
        self.next_id += 1

    def synchronize(self, *, ours=True):
        begin, end = self.host + 1, max(self.host, self.gpu) + 3
        self.activities.append(Activity("cudaDeviceSynchronize", False, begin, end - begin, self.next_id))
        self.next_id += 1
        if ours:
            self.stamps.append((begin + end) // 2)
        self.host = end + 1

    def iteration(self, call):
        self.launch(FLUSH, 50)
        self.synchronize()
        before = len(self.activities)
        call(self)
        self.expected.append([a for a in self.activities[before:] if a.on_gpu])
        self.synchronize()


kernels = st.builds(
    lambda name, duration, recorded, works: lambda trace: trace.launch(name, duration, recorded=recorded, works=works),
    st.sampled_from([FLUSH, "gemm", "Memset (Device)"]),
    st.integers(1, 10**6),
    st.booleans(),
    st.integers(1, 3),
)
call_bodies = st.lists(kernels, min_size=1, max_size=5).map(
    lambda launches: lambda trace: [launch(trace) for launch in launches]
)


@given(st.lists(call_bodies, min_size=1, max_size=6), st.integers(0, 2), st.randoms())
def test_every_activity_goes_to_the_call_that_launched_it(bodies, spare, random):
    """Also where calls use the same kernel as the flush, launch nothing that Kineto sees, or several at once."""
    trace = Trace()
    for _ in range(spare):
        trace.synchronize(ours=False)  # those of the profiler itself, before and after
    for body in bodies:
        trace.iteration(body)
    for _ in range(spare):
        trace.synchronize(ours=False)
    random.shuffle(trace.activities)  # threads report in no particular order
    found = attribute(trace.activities, len(bodies), trace.stamps)
    assert [sorted(own, key=lambda a: (a.start, a.duration)) for own in found] == [
        sorted(own, key=lambda a: (a.start, a.duration)) for own in trace.expected
    ]


def test_launches_count_where_they_were_made_even_if_the_clocks_of_host_and_gpu_disagree():
    trace = Trace()
    for duration in (10, 20, 30):
        trace.iteration(lambda trace, duration=duration: trace.launch("gemm", duration))
    skewed = [
        Activity(a.name, True, a.start - 40, a.duration, a.correlation) if a.on_gpu else a for a in trace.activities
    ]
    assert [[a.duration for a in own] for own in attribute(skewed, 3, [])] == [[10], [20], [30]]


def synchronising(trace):
    trace.launch("gemm", 70)
    trace.synchronize(ours=False)
    trace.launch("gemm", 7)


def test_a_call_that_synchronises_itself_is_told_by_host_time():
    trace = Trace()
    for _ in range(3):
        trace.iteration(synchronising)
    assert [[a.duration for a in own] for own in attribute(trace.activities, 3, trace.stamps)] == [[70, 7]] * 3
    with pytest.raises(MeasureError, match="6 pieces with GPU work were expected, 9 found"):
        attribute(trace.activities, 3, [])


def test_a_call_that_launches_nothing_is_an_error_not_a_zero():
    trace = Trace()
    trace.iteration(lambda trace: trace.launch("gemm", 5))
    trace.iteration(lambda trace: None)
    with pytest.raises(MeasureError, match="Does the call launch GPU work every time"):
        attribute(trace.activities, 2, trace.stamps)


def test_lost_activities_are_an_error_not_a_shift():
    trace = Trace()
    for _ in range(4):
        trace.iteration(lambda trace: trace.launch("gemm", 5))
    flush = [a for a in trace.activities if a.name == FLUSH]
    for lost in flush:
        with pytest.raises(MeasureError):
            attribute([a for a in trace.activities if a != lost], 4, trace.stamps)


def test_an_empty_trace_says_that_another_profiler_may_be_attached():
    with pytest.raises(MeasureError, match="another profiler"):
        attribute([], 3, [])


def kineto(name, device, start, duration, correlation, *, kind="kernel", annotation=False):
    event = {
        "name": name,
        "device_type": SimpleNamespace(name=device),
        "start_ns": start,
        "duration_ns": duration,
        "correlation_id": correlation,
        "is_user_annotation": annotation,
        "activity_type": kind,
    }
    return SimpleNamespace(**{key: (lambda value=value: value) for key, value in event.items() if value is not None})


@pytest.mark.parametrize("knows_kinds", [True, False])
def test_reading_kineto_events(knows_kinds):
    def kind(text):
        return text if knows_kinds else None

    events = [
        kineto("cudaLaunchKernel", "CPU", 10, 2, 7, kind=kind("cuda_runtime")),
        kineto("gemm", "CUDA", 20, 5, 7, kind=kind("kernel")),
        kineto("my range", "CUDA", 19, 9, 7, kind=kind("gpu_user_annotation"), annotation=True),
    ]
    if knows_kinds:
        events.append(kineto("Context Sync", "CUDA", 30, 9, 8, kind="cuda_sync"))
    session = SimpleNamespace(profiler=SimpleNamespace(kineto_results=SimpleNamespace(events=lambda: events)))
    assert activities_of(session) == [
        Activity("cudaLaunchKernel", False, 10, 2, 7),
        Activity("gemm", True, 20, 5, 7),
    ]


def test_kineto_of_the_installed_torch_has_the_attributes_and_the_clock_that_we_read():
    torch = pytest.importorskip("torch")
    from torch.profiler import ProfilerActivity, profile

    with profile(activities=[ProfilerActivity.CPU]) as session:
        before = time.time_ns()
        torch.ones(4)
        after = time.time_ns()
    (ones,) = (a for a in activities_of(session) if a.name == "aten::ones")
    assert not ones.on_gpu
    tolerance = 200_000  # ns; the profiler converts the processor's counter to the host's clock
    assert before - tolerance <= ones.start <= ones.start + ones.duration <= after + tolerance


# Recorded on a GPU ----------------------------------------------------------------------------------------------------

RECORDED = sorted((Path(__file__).parent / "data").glob("kineto_*.json"))


@pytest.mark.parametrize("path", RECORDED, ids=lambda path: path.stem)
def test_traces_recorded_on_a_gpu(path):
    """Each file holds traces of known calls: the number of activities that one call launches is known beforehand."""
    for name, recorded in json.loads(path.read_text())["traces"].items():
        activities = [Activity(*fields) for fields in recorded["activities"]]
        by_call = attribute(activities, recorded["iterations"], recorded["stamps"])
        assert {len(own) for own in by_call} == {recorded["activities_per_call"]}, name
        assert sum(sum(a.duration for a in own) for own in by_call) < sum(a.duration for a in activities if a.on_gpu)


# Samplers -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("mode", ["profiler", "events", "cudagraph"])
def test_cuda_modes_need_cuda(mode):
    with pytest.raises(ValueError, match="on a CPU use 'wall'"):
        make_sampler(mode, "cpu")


def test_wall_time_on_the_cpu():
    sampler = make_sampler("wall", "cpu")
    samples = sampler.sample(lambda: time.sleep(0.002), 5)
    assert len(samples) == 5
    assert all(0.002 <= sample < 0.1 for sample in samples)


def test_no_garbage_collection_while_sampling():
    sampler = make_sampler("wall", "cpu")
    seen = []
    sampler.sample(lambda: seen.append(gc.isenabled()), 2)
    assert seen == [False, False]
    assert gc.isenabled()
    with pytest.raises(RuntimeError):
        sampler.sample(lambda: (_ for _ in ()).throw(RuntimeError), 2)
    assert gc.isenabled()


class FakeCuda:
    """A GPU on which a flush takes 40 us; work advances its clock at once, or is noted while a graph is captured."""

    FLUSH = 40e-6

    def __init__(self):
        self.now, self.flushes, self.recording, self.last_graph = 0.0, 0, None, None
        self.default = object()
        self.stream = self.default
        self.captured_on = []

    def work(self, seconds):
        if self.recording is None:
            self.now += seconds
        else:
            self.recording.append(seconds)

    def flush(self):
        self.flushes += 1
        self.work(self.FLUSH)

    def module(self):
        """What `import torch` gives."""
        fake = self

        class Event:
            def __init__(self, enable_timing):
                assert enable_timing

            def record(self):
                self.at = fake.now

            def elapsed_time(self, other):
                return (other.at - self.at) * 1e3

        class CUDAGraph:
            def replay(self):
                fake.now += sum(self.nodes)

        @contextmanager
        def graph(target, stream):
            fake.captured_on.append(stream)
            target.nodes = fake.recording = []
            try:
                yield
            finally:
                fake.recording = None

        def empty(size, dtype, device):
            assert (size, dtype, device) == (2 * 60_000_000, "int8", "cuda")
            return SimpleNamespace(zero_=fake.flush)

        cuda = SimpleNamespace(
            Event=Event,
            CUDAGraph=CUDAGraph,
            graph=graph,
            synchronize=lambda: None,
            current_stream=lambda: fake.stream,
            default_stream=lambda: fake.default,
            get_device_properties=lambda device: SimpleNamespace(L2_cache_size=60_000_000),
        )
        return SimpleNamespace(cuda=cuda, empty=empty, int8="int8", OutOfMemoryError=MemoryError)


@pytest.fixture
def gpu(monkeypatch):
    fake = FakeCuda()
    monkeypatch.setitem(sys.modules, "torch", fake.module())
    return fake


@pytest.mark.parametrize("iterations", [1, 64, 150])
def test_events_leave_the_flush_out(gpu, iterations):
    durations = iter([1e-3 * (1 + i) for i in range(iterations)])
    samples = make_sampler("events", "cuda").sample(lambda: gpu.work(next(durations)), iterations)
    assert samples == pytest.approx([1e-3 * (1 + i) for i in range(iterations)])
    assert gpu.flushes == iterations


@pytest.mark.parametrize(("seconds", "calls"), [(5e-6, 20), (0.5e-3, 4), (10e-3, 1)])
def test_graphs_leave_the_flush_out(gpu, seconds, calls):
    samples = make_sampler("cudagraph", "cuda").sample(lambda: gpu.work(seconds), 7)
    assert samples == pytest.approx([seconds] * 7)
    assert gpu.flushes == 2 * calls  # captured once in each graph
    assert gpu.captured_on == [None, None]


def test_a_graph_is_captured_on_the_stream_in_use(gpu):
    gpu.stream = object()
    make_sampler("cudagraph", "cuda").sample(lambda: gpu.work(1e-3), 1)
    assert gpu.captured_on == [gpu.stream] * 2


def failing_in_capture(gpu, error):
    def call():
        if gpu.recording is not None:
            raise error
        gpu.work(1e-3)

    return call


def test_what_cannot_be_captured_names_the_modes_that_can(gpu):
    error = RuntimeError("CUDA error: operation not permitted when stream is capturing\nSearch for ...")
    with pytest.raises(MeasureError, match=r"\(CUDA error: .* is capturing\); use `--measure profiler` or `events`"):
        make_sampler("cudagraph", "cuda").sample(failing_in_capture(gpu, error), 5)


def test_no_memory_for_a_graph_stays_an_out_of_memory_error(gpu):
    with pytest.raises(MemoryError):
        make_sampler("cudagraph", "cuda").sample(failing_in_capture(gpu, MemoryError("CUDA out of memory")), 5)


def test_a_call_without_work_is_no_zero_in_a_graph(gpu):
    with pytest.raises(MeasureError, match="too short"):
        make_sampler("cudagraph", "cuda").sample(lambda: None, 5)


def test_wall_time_leaves_the_flush_out(gpu, monkeypatch):
    monkeypatch.setattr("jfabench.samplers.time.perf_counter", lambda: gpu.now)
    assert make_sampler("wall", "cuda").sample(lambda: gpu.work(1e-3), 3) == pytest.approx([1e-3] * 3)
    assert gpu.flushes == 3


def test_the_profiler_sums_what_one_call_launched(gpu, monkeypatch):
    trace = Trace()

    @contextmanager
    def profile(activities):
        assert activities == ["cuda only"]
        yield SimpleNamespace(profiler=SimpleNamespace(kineto_results=SimpleNamespace(events=trace_events)))

    def trace_events():
        return [
            kineto(a.name, "CUDA" if a.on_gpu else "CPU", a.start, a.duration, a.correlation) for a in trace.activities
        ]

    profiler = SimpleNamespace(profile=profile, ProfilerActivity=SimpleNamespace(CUDA="cuda only"))
    monkeypatch.setitem(sys.modules, "torch.profiler", profiler)
    sampler = make_sampler("profiler", "cuda")
    sampler._flush = lambda: trace.launch(FLUSH, 50_000)
    sampler._synchronize = trace.synchronize
    durations = iter([2_000, 3_000, 20_000, 30_000])

    def call():
        trace.launch("gemm", next(durations))
        trace.launch(FLUSH, next(durations))

    assert sampler.sample(call, 2) == pytest.approx([5e-6, 50e-6])
    assert sampler.kernels_per_call == 2
    assert sampler.last_spans == pytest.approx([5e-6, 50e-6])  # the second is launched before the first one ends


def test_spans_hold_the_gaps_between_kernels_and_count_overlapping_ones_once(gpu):
    sampler = make_sampler("profiler", "cuda")
    assert sampler.last_spans is None
    flush = Activity(FLUSH, True, 0, 50, 0)
    calls = [
        [Activity("a", True, 100, 10, 0), Activity("b", True, 130, 20, 0)],  # a gap of 20
        [Activity("a", True, 100, 50, 0), Activity("b", True, 110, 20, 0)],  # the second within the first
    ]
    shifted = [replace(a, start=a.start + 1000 * i) for i, own in enumerate(calls) for a in (flush, *own)]
    sampler.trace = lambda call, iterations: (shifted, [75, 500, 1075, 1500])
    assert sampler.sample(lambda: None, 2) == pytest.approx([30e-9, 70e-9])
    assert sampler.last_spans == pytest.approx([50e-9, 50e-9])


@pytest.fixture(scope="module")
def cuda():
    torch = pytest.importorskip("torch")
    if not torch.cuda.is_available():
        pytest.skip("needs an NVIDIA GPU")
    return torch


@pytest.mark.gpu
def test_the_modes_agree_on_a_long_kernel(cuda):
    a = cuda.randn(4096, 4096, device="cuda", dtype=cuda.bfloat16)
    medians = {}
    for mode in ("profiler", "events", "cudagraph", "wall"):
        sampler = make_sampler(mode, "cuda")
        sampler.sample(lambda: a @ a, 20)
        medians[mode] = statistics.median(sampler.sample(lambda: a @ a, 20))
        assert (sampler.kernels_per_call is None) == (sampler.last_spans is None) == (mode != "profiler")
    for mode in ("events", "cudagraph"):
        assert medians[mode] == pytest.approx(medians["profiler"], rel=0.15, abs=5e-6)
    assert medians["profiler"] < medians["wall"] < medians["profiler"] + 200e-6


@pytest.mark.gpu
def test_the_profiler_counts_the_kernels_of_forward_and_backward(cuda):
    x = cuda.randn(1 << 20, device="cuda", requires_grad=True)
    sampler = make_sampler("profiler", "cuda")
    sampler.sample(lambda: x.detach().sin().cos().add_(1), 5)
    assert sampler.kernels_per_call == 3
    y = x.sin()
    grad = cuda.ones_like(y)
    sampler.sample(lambda: cuda.autograd.grad(y, x, grad, retain_graph=True), 5)
    assert sampler.kernels_per_call == 2  # cos and mul, launched by autograd's own thread


@pytest.mark.gpu
def test_a_call_that_waits_for_the_device_is_timed_by_the_profiler(cuda):
    x = cuda.randn(1 << 20, device="cuda")

    def call():
        y = x.sin()
        cuda.cuda.synchronize()
        return y.cos()

    sampler = make_sampler("profiler", "cuda")
    assert min(sampler.sample(call, 10)) > 0
    assert sampler.kernels_per_call == 2


@pytest.mark.gpu
def test_a_call_that_cannot_be_captured_says_so_and_harms_nothing(cuda):
    x = cuda.randn(1000, device="cuda")
    with pytest.raises(MeasureError, match="cannot be captured in a CUDA graph"):
        make_sampler("cudagraph", "cuda").sample(lambda: x.sum().item(), 5)
    assert make_sampler("events", "cuda").sample(lambda: x.sum(), 5)
