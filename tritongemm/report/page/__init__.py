"""Results as one page that a browser shows, without a network: figures that plotly draws, and tables."""
