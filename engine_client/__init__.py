"""The client layer between an LLM server's front-end and its engine core, on pipes and shared memory.

Public names are those of vLLM 0.25.1's client layer.  Importing this package is cheap: a name is loaded when it is
first used.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from engine_client.clients.base import (
        EngineCoreClient as EngineCoreClient,
    )
    from engine_client.clients.inproc import (
        InprocClient as InprocClient,
    )
    from engine_client.clients.mp import (
        BackgroundResources as BackgroundResources,
    )
    from engine_client.clients.mp import (
        MPClient as MPClient,
    )
    from engine_client.clients.sync import (
        SyncMPClient as SyncMPClient,
    )
    from engine_client.config import (
        CacheConfig as CacheConfig,
    )
    from engine_client.config import (
        ClientOptions as ClientOptions,
    )
    from engine_client.config import (
        EngineConfig as EngineConfig,
    )
    from engine_client.config import (
        ModelConfig as ModelConfig,
    )
    from engine_client.config import (
        ParallelConfig as ParallelConfig,
    )
    from engine_client.config import (
        SchedulerConfig as SchedulerConfig,
    )
    from engine_client.engine.batch import (
        Batch as Batch,
    )
    from engine_client.engine.batch import (
        ModelOutput as ModelOutput,
    )
    from engine_client.engine.batch import (
        ScheduledRequest as ScheduledRequest,
    )
    from engine_client.engine.core import (
        EngineCore as EngineCore,
    )
    from engine_client.engine.executor import (
        Executor as Executor,
    )
    from engine_client.errors import (
        ClosedError as ClosedError,
    )
    from engine_client.errors import (
        EngineClientError as EngineClientError,
    )
    from engine_client.errors import (
        EngineDeadError as EngineDeadError,
    )
    from engine_client.errors import (
        EngineGenerateError as EngineGenerateError,
    )
    from engine_client.errors import (
        EngineStalledError as EngineStalledError,
    )
    from engine_client.errors import (
        ForeignProcessError as ForeignProcessError,
    )
    from engine_client.errors import (
        HandshakeTimeout as HandshakeTimeout,
    )
    from engine_client.errors import (
        LocalProtocolError as LocalProtocolError,
    )
    from engine_client.errors import (
        ProtocolError as ProtocolError,
    )
    from engine_client.errors import (
        RemoteCallError as RemoteCallError,
    )
    from engine_client.errors import (
        RemoteProtocolError as RemoteProtocolError,
    )
    from engine_client.errors import (
        SerializationError as SerializationError,
    )
    from engine_client.errors import (
        StartupError as StartupError,
    )
    from engine_client.messages import (
        EEP_NOTIFICATION_CALL_ID as EEP_NOTIFICATION_CALL_ID,
    )
    from engine_client.messages import (
        FINISH_REASON_STRINGS as FINISH_REASON_STRINGS,
    )
    from engine_client.messages import (
        EEPNotificationType as EEPNotificationType,
    )
    from engine_client.messages import (
        EngineCoreEvent as EngineCoreEvent,
    )
    from engine_client.messages import (
        EngineCoreEventType as EngineCoreEventType,
    )
    from engine_client.messages import (
        EngineCoreOutput as EngineCoreOutput,
    )
    from engine_client.messages import (
        EngineCoreOutputs as EngineCoreOutputs,
    )
    from engine_client.messages import (
        EngineCoreReadyResponse as EngineCoreReadyResponse,
    )
    from engine_client.messages import (
        EngineCoreRequest as EngineCoreRequest,
    )
    from engine_client.messages import (
        EngineCoreRequestType as EngineCoreRequestType,
    )
    from engine_client.messages import (
        FinishReason as FinishReason,
    )
    from engine_client.messages import (
        LogprobsLists as LogprobsLists,
    )
    from engine_client.messages import (
        PauseMode as PauseMode,
    )
    from engine_client.messages import (
        PrefillStats as PrefillStats,
    )
    from engine_client.messages import (
        PrefixCacheStats as PrefixCacheStats,
    )
    from engine_client.messages import (
        ReconfigureDistributedRequest as ReconfigureDistributedRequest,
    )
    from engine_client.messages import (
        ReconfigureRankType as ReconfigureRankType,
    )
    from engine_client.messages import (
        SchedulerStats as SchedulerStats,
    )
    from engine_client.messages import (
        UtilityOutput as UtilityOutput,
    )
    from engine_client.messages import (
        UtilityResult as UtilityResult,
    )
    from engine_client.params import (
        LoRARequest as LoRARequest,
    )
    from engine_client.params import (
        PoolingParams as PoolingParams,
    )
    from engine_client.params import (
        SamplingParams as SamplingParams,
    )

_HOMES = {
    "engine_client.clients.base": (
        "EngineCoreClient",
    ),
    "engine_client.clients.inproc": (
        "InprocClient",
    ),
    "engine_client.clients.mp": (
        "BackgroundResources",
        "MPClient",
    ),
    "engine_client.clients.sync": (
        "SyncMPClient",
    ),
    "engine_client.config": (
        "CacheConfig",
        "ClientOptions",
        "EngineConfig",
        "ModelConfig",
        "ParallelConfig",
        "SchedulerConfig",
    ),
    "engine_client.engine.core": (
        "EngineCore",
    ),
    "engine_client.engine.executor": (
        "Executor",
    ),
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
}
_HOME_OF = {name: home for home, names in _HOMES.items() for name in names}

__all__ = list(_HOME_OF)  # noqa: PLE0605  # a list, once it is evaluated


def __getattr__(name: str) -> Any:
    home = _HOME_OF.get(name)
    if home is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(import_module(home), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
