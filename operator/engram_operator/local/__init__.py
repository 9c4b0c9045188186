"""Local mode, `engram up`: the operator's own pod specs as processes of this machine.

A thin executor of what the builders give: it maps volumes, ports, probes and Secrets to folders, loopback, HTTP calls
and files, and refuses what it cannot map. It decides nothing that a cluster would decide differently.
"""
