"""Plug-ins: what may serve a call at run time, asked in the order of their ranks until one answers with a kernel."""
