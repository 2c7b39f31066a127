"""Assemblers and compilers run as tools."""
