"""The one import of vllm in a process: quiet, without a GPU, and with nothing written under the home folder."""

from __future__ import annotations

import logging
import os
import tempfile
import warnings
from pathlib import Path

_ENVIRONMENT = {
    "VLLM_CACHE_ROOT": str(Path(tempfile.gettempdir()) / "kvledger-vllm"),
    "VLLM_CONFIGURE_LOGGING": "0",
    "VLLM_NO_USAGE_STATS": "1",
}
for _name, _value in _ENVIRONMENT.items():
    os.environ.setdefault(_name, _value)
# each scheduler that is built would tell of its budget and its connector
logging.getLogger("vllm").setLevel(logging.ERROR)

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    import vllm
    from vllm.config import (
        CacheConfig,
        DeviceConfig,
        KVTransferConfig,
        SchedulerConfig,
        VllmConfig,
    )
    from vllm.distributed.kv_transfer.kv_connector.v1 import KVConnectorBase_V1, KVConnectorRole, SupportsHMA
    from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorMetadata
    from vllm.sampling_params import SamplingParams
    from vllm.utils.hashing import sha256
    from vllm.v1.core.kv_cache_manager import KVCacheManager
    from vllm.v1.core.kv_cache_utils import (
        get_block_hash,
        get_group_id,
        get_request_block_hasher,
        init_none_hash,
    )
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.core.sched.scheduler import Scheduler
    from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec, MambaSpec
    from vllm.v1.outputs import KVConnectorOutput, ModelRunnerOutput
    from vllm.v1.request import Request, RequestStatus
    from vllm.v1.structured_output import StructuredOutputManager

init_none_hash(sha256)

VERSION: str = vllm.__version__

__all__ = [
    "VERSION",
    "CacheConfig",
    "DeviceConfig",
    "FullAttentionSpec",
    "KVCacheConfig",
    "KVCacheGroupSpec",
    "KVCacheManager",
    "KVConnectorBase_V1",
    "KVConnectorMetadata",
    "KVConnectorOutput",
    "KVConnectorRole",
    "KVTransferConfig",
    "MambaSpec",
    "ModelRunnerOutput",
    "Request",
    "RequestStatus",
    "SamplingParams",
    "Scheduler",
    "SchedulerConfig",
    "SchedulerOutput",
    "StructuredOutputManager",
    "SupportsHMA",
    "VllmConfig",
    "get_block_hash",
    "get_group_id",
    "get_request_block_hasher",
    "init_none_hash",
    "sha256",
]
