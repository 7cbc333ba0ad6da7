"""The twin: what this machine can't run, simulated from data sheets with the farm's own decisions.

`farm.dispatch`, `farm.admission`, `farm.pool` (its decisions), `farm.elastic`, `farm.agent.caps`, `trainer.group`,
`trainer.advantage` and `trainer.batch` run here unchanged, in virtual time, against models of the engine, the sandbox
and the trainer. ``docs/twin.md`` says what is modelled and how; ``calibration.toml`` says which figures go in.
"""
