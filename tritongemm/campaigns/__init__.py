"""Campaigns: from a log of what a job called to kernels that measurably gained."""
