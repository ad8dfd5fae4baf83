"""An OpenAI-compatible server around one decoder: continuous batching over fixed slots, and states by name."""
