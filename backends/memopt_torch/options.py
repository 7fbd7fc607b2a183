"""Options of `backend_options.torch`."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import BaseModel, ByteSize, ConfigDict, Field, model_validator


class OffloadOptions(BaseModel):
    """How offloaded activations travel.

    Attributes:
        prefetch: How many units' values are on their way back ahead of the one the backward pass is in.
        keep_last_unit: Leave the last unit's values on the device: they are needed at once.
        synchronous: Copy on the compute stream; slower, and a way to rule out ordering faults.
        pinned_pool: Most bytes of host memory kept for reuse; left out: as many as are needed.
        trusted_optimizers: Class names of optimizers not of torch.optim that update each parameter by itself, so that
            their state can be offloaded.
    """

    model_config = ConfigDict(frozen=True, strict=True, extra="forbid", validate_default=True)

    prefetch: Annotated[int, Field(ge=0)] = 1
    keep_last_unit: bool = True
    synchronous: bool = False
    pinned_pool: ByteSize | None = None
    trusted_optimizers: tuple[str, ...] = ()


class Options(BaseModel):
    """What the torch backend can be told beyond the policy's rules.

    Attributes:
        engine: `layer`: our units in one arena. `fsdp2`: `torch.distributed.fsdp.fully_shard` behind the same policy.
        gradient_slots: Whole-gradient buffers of a unit in flight. 2 lets a reduction run beside the next unit's whole
            backward pass and costs one more layer's gradients.
        communication: `async`: collectives run beside compute. `blocking`: each is waited for where it is issued.
        timeout_s: After which a collective counts as stalled; left out, the process group's own.
        unused_parameters: `auto`: ranks agree on parameters without gradient only where the first step has some.
            `agree`: in every step (one small all-reduce).
        offload: How offloaded activations travel.
    """

    model_config = ConfigDict(frozen=True, strict=True, extra="forbid", validate_default=True)

    engine: Literal["layer", "fsdp2"] = "layer"
    gradient_slots: Literal[1, 2] = 1
    communication: Literal["async", "blocking"] = "async"
    timeout_s: Annotated[float, Field(gt=0)] | None = None
    unused_parameters: Literal["auto", "agree"] = "auto"
    offload: OffloadOptions = OffloadOptions()

    @model_validator(mode="after")
    def _of_one_engine(self) -> Options:
        """Options of the layer engine have no effect on FSDP2, and nothing is accepted and ignored."""
        own = {"gradient_slots", "communication", "timeout_s", "unused_parameters"}
        if self.engine == "fsdp2" and (written := sorted(own & self.model_fields_set)):
            raise ValueError(f"{', '.join(written)}: of the layer engine; leave out with `engine: fsdp2`")
        return self
