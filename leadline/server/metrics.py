"""What the server counts and times, for Prometheus. The names are vLLM's stems after a prefix of our own."""

from collections.abc import Iterable

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric

from leadline.engine.engine import Stats

PREFIX = "leadline:"
FIRST_TOKEN_SECONDS = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 25, 50, 100)
INTER_TOKEN_SECONDS = (0.002, 0.005, 0.01, 0.02, 0.03, 0.05, 0.075, 0.1, 0.2, 0.5, 1, 2.5)
LAG_SECONDS = (0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 5)
REQUEST_SECONDS = (0.1, 0.25, 0.5, 1, 2.5, 5, 10, 25, 50, 100, 250, 500, 1000)


class Metrics:
    """The counters and histograms of one server."""

    def __init__(self, model: str) -> None:
        self._model = model
        self._registry = CollectorRegistry()
        label = ["model_name"]

        def counter(name: str, text: str) -> Counter:
            return Counter(PREFIX + name, text, label, registry=self._registry).labels(model)

        def histogram(name: str, text: str, buckets: tuple[float, ...]) -> Histogram:
            return Histogram(PREFIX + name, text, label, registry=self._registry, buckets=buckets).labels(model)

        self.prompt_tokens = counter("prompt_tokens", "Tokens of prompts that got an answer.")
        self.generated_tokens = counter("generation_tokens", "Tokens generated.")
        self.cached_tokens = counter("prefix_cache_hits", "Tokens of prompts found in the prefix cache.")
        self.looked_up_tokens = counter("prefix_cache_queries", "Tokens of prompts looked up in the prefix cache.")
        self.first_token = histogram("time_to_first_token_seconds", "From request to first token.", FIRST_TOKEN_SECONDS)
        self.inter_token = histogram("inter_token_latency_seconds", "From token to token.", INTER_TOKEN_SECONDS)
        self.request = histogram("e2e_request_latency_seconds", "From request to last token.", REQUEST_SECONDS)
        self.loop_lag = histogram("event_loop_lag_seconds", "How late the server's event loop wakes up.", LAG_SECONDS)
        self.finished = Counter(
            PREFIX + "request_success",
            "Choices that ended, by reason; abort: their client left, or asked for it.",
            [*label, "finished_reason"],
            registry=self._registry,
        )
        self._engine = _EngineMetrics(model)
        self._registry.register(self._engine)

    def start(self, prompt_tokens: int, now: float) -> "Clock":
        """Begin to time a request that is now sent to the engine."""
        return Clock(self, prompt_tokens, now)

    def count_end(self, reason: str) -> None:
        """A choice has ended."""
        self.finished.labels(self._model, reason).inc()

    def text(self, stats: Stats | None) -> bytes:
        """Everything in Prometheus' text format; `stats` is None when the engine does not answer."""
        self._engine.stats = stats
        return generate_latest(self._registry)


class Clock:
    """Times one request, over all of its choices. Moments are seconds of `time.perf_counter`."""

    def __init__(self, metrics: Metrics, prompt_tokens: int, begun: float) -> None:
        self._metrics, self._prompt_tokens, self._begun = metrics, prompt_tokens, begun
        self._last: dict[int, float] = {}

    def took(self, choice: int, tokens: int, cached_tokens: int, finish_reason: str | None, now: float) -> None:
        """Something came for a choice."""
        metrics = self._metrics
        if not self._last and tokens:
            metrics.prompt_tokens.inc(self._prompt_tokens)
            metrics.looked_up_tokens.inc(self._prompt_tokens)
            metrics.cached_tokens.inc(cached_tokens)
        if tokens:
            metrics.generated_tokens.inc(tokens)
            if choice in self._last:
                for _ in range(tokens):
                    metrics.inter_token.observe((now - self._last[choice]) / tokens)
            else:
                metrics.first_token.observe(now - self._begun)
            self._last[choice] = now
        if finish_reason is not None:
            metrics.request.observe(now - self._begun)
            metrics.count_end(finish_reason)

    def left(self, choices: int, reason: str) -> None:
        """The request is over, with so many choices that had no last token."""
        for _ in range(choices):
            self._metrics.count_end(reason)


class _EngineMetrics:
    """What the engine says of itself, at the time of asking."""

    def __init__(self, model: str) -> None:
        self.stats: Stats | None = None
        self._model = model

    def collect(self) -> Iterable[Metric]:
        """Prometheus' interface of collectors."""
        stats = self.stats
        yield self._gauge("engine_up", "Whether the engine answers.", float(stats is not None))
        if stats is None:
            return
        yield self._gauge("num_requests_running", "Requests that have pages and a slot.", stats.running)
        yield self._gauge("num_requests_waiting", "Requests that wait for them.", stats.waiting)
        pages = (stats.pages_used - stats.pages_reusable) / stats.pages
        yield self._gauge("kv_cache_usage_perc", "Share of the pages that requests hold; 1 is all.", pages)
        yield self._gauge(
            "kv_cache_reusable_perc", "Share of the pages kept for reuse.", stats.pages_reusable / stats.pages
        )
        yield self._gauge("slot_usage_perc", "Share of the slots in use.", stats.slots_used / stats.slots)
        yield self._counter("num_preemptions", "Requests that gave pages and slot back.", stats.preemptions)
        yield self._counter("steps", "Forward passes.", stats.steps)

    def _gauge(self, name: str, text: str, value: float) -> Metric:
        family = GaugeMetricFamily(PREFIX + name, text, labels=["model_name"])
        family.add_metric([self._model], value)
        return family

    def _counter(self, name: str, text: str, value: float) -> Metric:
        family = CounterMetricFamily(PREFIX + name, text, labels=["model_name"])
        family.add_metric([self._model], value)
        return family
