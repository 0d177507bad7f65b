// The aten operators (without "aten::") whose NPU kernels need an aclnn operator that is not simulated.
// Used by boxed.cpp. When you add an OP line for one of them, delete it here.
#pragma once

namespace cannsim {

inline constexpr const char* kBoxedNames[] = {
    "_fake_quantize_per_tensor_affine_cachemask_tensor_qparams", "_linalg_eigh", "_linalg_slogdet",
    "_scaled_mm", "_scaled_mm_v2", "_transform_bias_rescale_qkv", "attention_worker_scheduler_",
    "fake_quantize_per_channel_affine_cachemask", "ffn_worker_scheduler_", "gru", "linalg_eigh",
    "linalg_householder_product", "linalg_lstsq", "lstm",
};

}  // namespace cannsim
