"""What a synchronous vLLM engine keeps in its memory: giving it back for training, and bringing it back."""

from __future__ import annotations

from typing import Any

from weightsync.rollout.vllm.cpu import is_cpu_platform
from weightsync.rollout.vllm.host_state import HostState


class EngineMemory:
    """The weights and the KV cache of one ``vllm.LLM``.

    Args:
        llm: the engine.
        state: of its host: ``asleep`` and ``kv_released`` are kept there.
    """

    def __init__(self, llm: Any, state: HostState) -> None:
        self._llm = llm
        self._state = state

    @property
    def why_resident(self) -> str | None:
        """Why vLLM cannot give memory back; `None` where it can."""
        if is_cpu_platform():
            return "vLLM cannot give memory back on a CPU"
        if not self._llm.llm_engine.vllm_config.model_config.enable_sleep_mode:
            return "vLLM was started without enable_sleep_mode=True"
        return None

    def sleep(self, level: int) -> None:
        """Give back weights and KV cache."""
        self._state.asleep = True
        self._llm.sleep(level=level)

    def resume_weights(self) -> None:
        """Bring the weights of an engine that sleeps back; the KV cache stays away."""
        state = self._state
        if state.kv_released or not (state.asleep or self._llm.llm_engine.is_sleeping()):
            return
        state.asleep = True
        self._llm.wake_up(tags=["weights"])
        state.asleep, state.kv_released = False, True

    def release_kv_cache(self) -> None:
        """Give the KV cache back where vLLM can; no request runs."""
        self.resume_weights()
        if self.why_resident is not None or self._state.kv_released:
            return
        # Before the calls: whichever of them fails, a resume has to wake the scheduler.
        self._state.kv_released = True
        # `pause` has let every request end: nothing is aborted, and no engine refuses this mode.
        self._llm.sleep(level=0, mode="abort")
        self._llm.release_kv_cache_memory()

    def resume_kv_cache(self) -> None:
        """Bring the KV cache back, if it was given back."""
        if self._state.kv_released:
            self._llm.wake_up(tags=["kv_cache"])
            self._llm.wake_up(tags=["scheduling"])
            self._state.kv_released = False

    def resume(self) -> None:
        """Bring back whatever is still away."""
        if self._state.asleep:
            self.resume_weights()
        self.resume_kv_cache()
