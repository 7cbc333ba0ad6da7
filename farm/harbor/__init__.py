"""Harbor's formats: task folders (``task.toml`` 1.4) read and written, trajectories as ATIF 1.8, and what lets a Harbor
user run on the farm's sandboxes. Only ``environment`` and ``farm.sandbox.harbor`` need the package ``harbor``."""
