"""The tuning pipeline, which turns problems into records stage by stage."""
