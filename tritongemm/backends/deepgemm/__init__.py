"""The backend of DeepGEMM, the library of block-scaled products that servers of DeepSeek's models call."""
