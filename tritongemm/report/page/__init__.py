"""Results as one page for a browser, without a network: figures that plotly draws, and tables."""
