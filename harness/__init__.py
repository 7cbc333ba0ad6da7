"""Claims in, a report out: starts runs through their public commands and measures only from the logs."""
