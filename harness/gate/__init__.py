"""The gate: does this tree solve as many tasks and run as fast as the base did?

``design`` what is gated and how much is spent; ``boundaries``, ``evidence`` and ``decide`` are pure and hold all of the
statistics; ``simulate`` shows their error rates; ``baseline``, ``bench``, ``trees`` and ``run`` touch the machine.
"""
