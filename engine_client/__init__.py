"""The client layer between an LLM server's front-end and its engine core, on pipes and shared memory.

Public names are those of vLLM 0.25.1's client layer.  Importing this package is cheap: a name is loaded when it is
first used.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from engine_client.clients.aio import AsyncMPClient as AsyncMPClient
    from engine_client.clients.aio_streams import AsyncOutputStream as AsyncOutputStream
    from engine_client.clients.base import (
        EngineCoreClient as EngineCoreClient,
    )
    from engine_client.clients.data_parallel import (
        DPAsyncMPClient as DPAsyncMPClient,
        DPLBAsyncMPClient as DPLBAsyncMPClient,
    )
    from engine_client.clients.endpoint import Endpoint as Endpoint
    from engine_client.clients.events import EngineEvent as EngineEvent, EventStream as EventStream
    from engine_client.clients.inproc import (
        InprocClient as InprocClient,
    )
    from engine_client.clients.mp import (
        BackgroundResources as BackgroundResources,
        MPClient as MPClient,
    )
    from engine_client.clients.streams import OutputStream as OutputStream
    from engine_client.clients.sync import (
        SyncMPClient as SyncMPClient,
    )
    from engine_client.config import (
        CacheConfig as CacheConfig,
        ClientOptions as ClientOptions,
        EngineConfig as EngineConfig,
        ModelConfig as ModelConfig,
        ParallelConfig as ParallelConfig,
        SchedulerConfig as SchedulerConfig,
    )
    from engine_client.engine.batch import (
        Batch as Batch,
        ModelOutput as ModelOutput,
        ScheduledRequest as ScheduledRequest,
    )
    from engine_client.engine.core import (
        EngineCore as EngineCore,
    )
    from engine_client.engine.executor import (
        Executor as Executor,
        report_progress as report_progress,
    )
    from engine_client.errors import (
        ClosedError as ClosedError,
        EngineClientError as EngineClientError,
        EngineDeadError as EngineDeadError,
        EngineGenerateError as EngineGenerateError,
        EngineStalledError as EngineStalledError,
        ForeignProcessError as ForeignProcessError,
        HandshakeTimeout as HandshakeTimeout,
        LocalProtocolError as LocalProtocolError,
        ProtocolError as ProtocolError,
        RemoteCallError as RemoteCallError,
        RemoteProtocolError as RemoteProtocolError,
        SerializationError as SerializationError,
        StartupError as StartupError,
    )
    from engine_client.ipc.observer import RunningEngine as RunningEngine, running_engines as running_engines
    from engine_client.launch import CoreEngines as CoreEngines, launch_core_engines as launch_core_engines
    from engine_client.messages import (
        EEP_NOTIFICATION_CALL_ID as EEP_NOTIFICATION_CALL_ID,
        FINISH_REASON_STRINGS as FINISH_REASON_STRINGS,
        EEPNotificationType as EEPNotificationType,
        EngineCoreEvent as EngineCoreEvent,
        EngineCoreEventType as EngineCoreEventType,
        EngineCoreOutput as EngineCoreOutput,
        EngineCoreOutputs as EngineCoreOutputs,
        EngineCoreReadyResponse as EngineCoreReadyResponse,
        EngineCoreRequest as EngineCoreRequest,
        EngineCoreRequestType as EngineCoreRequestType,
        FinishReason as FinishReason,
        LogprobsLists as LogprobsLists,
        PauseMode as PauseMode,
        PrefillStats as PrefillStats,
        PrefixCacheStats as PrefixCacheStats,
        ReconfigureDistributedRequest as ReconfigureDistributedRequest,
        ReconfigureRankType as ReconfigureRankType,
        SchedulerStats as SchedulerStats,
        UtilityOutput as UtilityOutput,
        UtilityResult as UtilityResult,
    )
    from engine_client.params import (
        LoRARequest as LoRARequest,
        PoolingParams as PoolingParams,
        SamplingParams as SamplingParams,
    )
    from engine_client.progress import ProgressBar as ProgressBar
    from engine_client.protocol.registry import register_type as register_type


_HOMES = {
    "engine_client.clients.aio": ("AsyncMPClient",),
    "engine_client.clients.aio_streams": ("AsyncOutputStream",),
    "engine_client.clients.base": ("EngineCoreClient",),
    "engine_client.clients.data_parallel": ("DPAsyncMPClient", "DPLBAsyncMPClient"),
    "engine_client.clients.inproc": ("InprocClient",),
    "engine_client.clients.mp": (
        "BackgroundResources",
        "MPClient",
    ),
    "engine_client.clients.streams": ("OutputStream",),
    "engine_client.clients.sync": ("SyncMPClient",),
    "engine_client.config": (
        "CacheConfig",
        "ClientOptions",
        "EngineConfig",
        "ModelConfig",
        "ParallelConfig",
        "SchedulerConfig",
    ),
    "engine_client.engine.core": ("EngineCore",),
    "engine_client.engine.executor": ("Executor", "report_progress"),
    "engine_client.engine.batch": (
        "Batch",
        "ModelOutput",
        "ScheduledRequest",
    ),
    "engine_client.errors": (
        "ClosedError",
        "EngineClientError",
        "EngineDeadError",
        "EngineGenerateError",
        "EngineStalledError",
        "ForeignProcessError",
        "HandshakeTimeout",
        "LocalProtocolError",
        "ProtocolError",
        "RemoteCallError",
        "RemoteProtocolError",
        "SerializationError",
        "StartupError",
    ),
    "engine_client.clients.endpoint": ("Endpoint",),
    "engine_client.clients.events": ("EngineEvent", "EventStream"),
    "engine_client.ipc.observer": ("RunningEngine", "running_engines"),
    "engine_client.launch": ("CoreEngines", "launch_core_engines"),
    "engine_client.messages": (
        "EEP_NOTIFICATION_CALL_ID",
        "FINISH_REASON_STRINGS",
        "EEPNotificationType",
        "EngineCoreEvent",
        "EngineCoreEventType",
        "EngineCoreOutput",
        "EngineCoreOutputs",
        "EngineCoreReadyResponse",
        "EngineCoreRequest",
        "EngineCoreRequestType",
        "FinishReason",
        "LogprobsLists",
        "PauseMode",
        "PrefillStats",
        "PrefixCacheStats",
        "ReconfigureDistributedRequest",
        "ReconfigureRankType",
        "SchedulerStats",
        "UtilityOutput",
        "UtilityResult",
    ),
    "engine_client.params": (
        "LoRARequest",
        "PoolingParams",
        "SamplingParams",
    ),
    "engine_client.progress": ("ProgressBar",),
    "engine_client.protocol.registry": ("register_type",),
}
_HOME_OF = {name: home for home, names in _HOMES.items() for name in names}

__version__ = "0.1.0"

__all__ = list(_HOME_OF)


def __getattr__(name: str) -> Any:
    home = _HOME_OF.get(name)
    if home is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(import_module(home), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
