.amdgcn_target "amdgcn-amd-amdhsa--gfx942"
.text
.globl k
.type k,@function
k: s_endpgm
.section .rodata,"a"
.amdhsa_kernel k
  .amdhsa_next_free_vgpr 8
  .amdhsa_next_free_sgpr 8
  .amdhsa_accum_offset 8
.end_amdhsa_kernel
.amdgpu_metadata
amdhsa.version: [1, 2]
amdhsa.target: amdgcn-amd-amdhsa--gfx942
amdhsa.kernels:
  - {.name: k, .symbol: k.kd, .kernarg_segment_size: 208, .group_segment_fixed_size: 64, .private_segment_fixed_size: 0,
     .kernarg_segment_align: 16, .wavefront_size: 64, .sgpr_count: 8, .vgpr_count: 8, .max_flat_workgroup_size: 256}
.end_amdgpu_metadata
