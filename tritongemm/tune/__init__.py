"""Tunes problems: the pipeline that turns them into records stage by stage."""
