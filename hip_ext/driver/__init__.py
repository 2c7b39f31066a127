"""The binding of the GPU driver: modules, launches, streams, graphs and tensor maps."""
