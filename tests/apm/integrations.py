"""The integrations that are tested, each with what it would send kept in the run's record.

An environment has one of them. ``start`` comes before Celery is imported, in the worker as in the publisher.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterator
from importlib.util import find_spec
from typing import Any, Protocol

#: Takes the kind of something that would be sent, such as a span's operation.
Note = Callable[[str], None]

#: Nobody listens there.
NOWHERE = "127.0.0.1:9"


class Integration(Protocol):
    """One integration."""

    #: The module to import.
    module: str

    def start(self, note: Note) -> None:
        """Start it in this process; ``note`` is called for all that would be sent."""

    def publisher(self) -> contextlib.AbstractContextManager[None]:
        """Return a context of something that publishes, such as a web request."""

    def trace_id(self) -> str:
        """Return the trace that goes on here."""


class Sentry:
    """sentry-sdk with its Celery integration."""

    module = "sentry_sdk"

    def start(self, note: Note) -> None:
        import sentry_sdk
        from sentry_sdk.integrations.celery import CeleryIntegration
        from sentry_sdk.transport import Transport

        class Kept(Transport):
            def capture_envelope(self, envelope: Any) -> None:
                for item in envelope.items:
                    note("error" if item.type == "event" else item.type)

        # Tracing alone: errors of this process's own log are no errors of a task.
        sentry_sdk.init(
            f"http://key@{NOWHERE}/1", transport=Kept, traces_sample_rate=1.0, integrations=[CeleryIntegration()]
        )

    @contextlib.contextmanager
    def publisher(self) -> Iterator[None]:
        import sentry_sdk

        with sentry_sdk.start_transaction(op="test", name="publisher"):
            yield

    def trace_id(self) -> str:
        import sentry_sdk

        return str(sentry_sdk.get_traceparent()).partition("-")[0]


class Datadog:
    """ddtrace with distributed tracing, without its agent."""

    module = "ddtrace"

    def start(self, note: Note) -> None:
        os.environ |= {
            "DD_CELERY_DISTRIBUTED_TRACING": "true",
            "DD_TRACE_AGENT_URL": f"http://{NOWHERE}",
            "DD_INSTRUMENTATION_TELEMETRY_ENABLED": "false",
            "DD_REMOTE_CONFIGURATION_ENABLED": "false",
        }
        import ddtrace.auto  # noqa: F401 - it instruments all that it knows
        from ddtrace.trace import TraceFilter, tracer

        class Kept(TraceFilter):
            def process_trace(self, trace: list[Any]) -> list[Any]:
                for span in trace:
                    if span.name.startswith("celery."):  # those of Redis are the worker's own as well
                        note(span.name)
                return trace

        tracer.configure(trace_processors=[Kept()])

    @contextlib.contextmanager
    def publisher(self) -> Iterator[None]:
        from ddtrace.trace import tracer

        with tracer.trace("publisher"):
            yield

    def trace_id(self) -> str:
        from ddtrace.trace import tracer

        context = tracer.current_trace_context()
        return f"{context.trace_id:032x}" if context else ""


class OpenTelemetry:
    """OpenTelemetry's Celery instrumentation."""

    module = "opentelemetry.instrumentation.celery"

    def start(self, note: Note) -> None:
        from opentelemetry import trace
        from opentelemetry.instrumentation.celery import CeleryInstrumentor
        from opentelemetry.sdk.trace import TracerProvider
        from opentelemetry.sdk.trace.export import SimpleSpanProcessor, SpanExporter, SpanExportResult

        class Kept(SpanExporter):
            def export(self, spans: Any) -> SpanExportResult:
                for span in spans:
                    note(span.kind.name)
                return SpanExportResult.SUCCESS

        provider = TracerProvider()
        provider.add_span_processor(SimpleSpanProcessor(Kept()))
        trace.set_tracer_provider(provider)
        CeleryInstrumentor().instrument()

    @contextlib.contextmanager
    def publisher(self) -> Iterator[None]:
        from opentelemetry import trace

        with trace.get_tracer("test").start_as_current_span("publisher"):
            yield

    def trace_id(self) -> str:
        from opentelemetry import trace

        return f"{trace.get_current_span().get_span_context().trace_id:032x}"


class NewRelic:
    """New Relic's agent, which in developer mode sends nothing."""

    module = "newrelic"

    def start(self, note: Note) -> None:
        os.environ |= {
            "NEW_RELIC_APP_NAME": "tests",
            "NEW_RELIC_LICENSE_KEY": 40 * "0",
            "NEW_RELIC_DEVELOPER_MODE": "true",
        }
        import newrelic.agent

        newrelic.agent.initialize()

        def record(wrapped: Any, instance: Any, args: Any, kwargs: Any) -> Any:
            note("transaction")
            return wrapped(*args, **kwargs)

        newrelic.agent.wrap_function_wrapper("newrelic.core.application", "Application.record_transaction", record)

    @contextlib.contextmanager
    def publisher(self) -> Iterator[None]:
        import newrelic.agent

        with newrelic.agent.BackgroundTask(newrelic.agent.register_application(timeout=10), name="publisher"):
            yield

    def trace_id(self) -> str:
        import newrelic.agent

        return str(newrelic.agent.current_trace_id())


def installed() -> Integration:
    """Return the integration of this environment.

    Raises:
        SystemExit: there is none.
    """
    for integration in (Sentry(), Datadog(), OpenTelemetry(), NewRelic()):
        with contextlib.suppress(ModuleNotFoundError):
            if find_spec(integration.module):
                return integration
    raise SystemExit("no integration is installed; see the environments apm-* in tox.ini")
