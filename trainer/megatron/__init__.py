"""The part of the trainer that holds torch and Megatron-core. Importing it costs seconds: import it late."""

from trainer.megatron import cpu as cpu  # imports Megatron (and, without CUDA, adapts it) before any other module does
