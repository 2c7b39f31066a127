"""The fault campaign: random damage, hostile text, kills and full disks, and what the commands make of them.

`scripts/torture [minutes]` runs the long form; tests/cpu/scenarios/test_torture.py runs a few tries of each campaign.
"""
