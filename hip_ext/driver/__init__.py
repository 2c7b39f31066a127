"""The GPU driver: modules, launches, streams, graphs, tensor maps."""
