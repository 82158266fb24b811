// What torch does for a GPU, in place of its CUDA library.
#include <cstdint>

extern "C" {
int32_t aoti_torch_create_device_guard(int32_t, void** guard) {
  *guard = nullptr;
  return 0;
}
int32_t aoti_torch_delete_device_guard(void*) { return 0; }
int32_t aoti_torch_get_current_cuda_stream(int32_t, void** stream) {
  *stream = nullptr;
  return 0;
}
void torch_c10_cuda_check_msg(int32_t, const char*, const char*, uint32_t, bool, char** message) {
  *message = nullptr;
}
void torch_c10_cuda_free_error_msg(char*) {}
}
