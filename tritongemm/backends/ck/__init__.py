"""Backend: Composable Kernel."""
