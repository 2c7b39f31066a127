"""A server of a language model is started, sent requests and ended, and its times are measured over HTTP."""
