// A CUDA driver without a GPU: what Triton's launchers are compiled against, which notes what they pass.
#include <cuda.h>
#include <string.h>

#define MOST_BYTES 4096

typedef struct {
  long long words[16]; // grid, block, shared memory, stream, function, number of attributes, attributes' ids
  unsigned char params[MOST_BYTES];
} Noted;

static size_t sizes[64];
static int count;
static Noted last;
static int launches;

void expect(int n, const size_t *bytes) {
  count = n;
  memcpy(sizes, bytes, n * sizeof(size_t));
}

int noted(Noted *to) {
  *to = last;
  return launches;
}

CUresult cuLaunchKernelEx(const CUlaunchConfig *config, CUfunction function, void **params, void **extra) {
  memset(&last, 0, sizeof last);
  long long given[] = {config->gridDimX,  config->gridDimY,  config->gridDimZ,         config->blockDimX,
                       config->blockDimY, config->blockDimZ, config->sharedMemBytes,   (long long)config->hStream,
                       (long long)function, config->numAttrs};
  memcpy(last.words, given, sizeof given);
  for (unsigned i = 0; i < config->numAttrs && i < 6; ++i)
    last.words[10 + i] = config->attrs[i].id;
  unsigned char *at = last.params;
  for (int i = 0; i < count; at += sizes[i++])
    memcpy(at, params[i], sizes[i]);
  ++launches;
  return CUDA_SUCCESS;
}

CUresult cuTensorMapEncodeTiled(CUtensorMap *map, CUtensorMapDataType type, cuuint32_t rank, void *address,
                                const cuuint64_t *dims, const cuuint64_t *strides, const cuuint32_t *box,
                                const cuuint32_t *steps, CUtensorMapInterleave interleave, CUtensorMapSwizzle swizzle,
                                CUtensorMapL2promotion promotion, CUtensorMapFloatOOBfill fill) {
  long long said[sizeof(CUtensorMap) / sizeof(long long)] = {type, rank, (long long)address, swizzle, promotion, fill};
  for (unsigned i = 0; i < rank && i < 3; ++i) {
    said[6 + i] = dims[i];
    said[9 + i] = box[i];
    said[12 + i] = i + 1 < rank ? (long long)strides[i] : steps[i];
  }
  memcpy(map, said, sizeof said);
  return CUDA_SUCCESS;
}

CUresult cuPointerGetAttribute(void *data, CUpointer_attribute attribute, CUdeviceptr pointer) {
  *(CUdeviceptr *)data = pointer;
  return CUDA_SUCCESS;
}

CUresult cuDeviceGetAttribute(int *value, CUdevice_attribute attribute, CUdevice device) {
  *value = 232448;
  return CUDA_SUCCESS;
}

CUresult cuFuncGetAttribute(int *value, CUfunction_attribute attribute, CUfunction function) {
  *value = attribute == CU_FUNC_ATTRIBUTE_MAX_THREADS_PER_BLOCK ? 1024 : 0;
  return CUDA_SUCCESS;
}

CUresult cuModuleLoadData(CUmodule *module, const void *image) {
  static long long next = 4096;
  *module = (CUmodule)(next += 64);
  return CUDA_SUCCESS;
}

CUresult cuModuleGetFunction(CUfunction *function, CUmodule module, const char *name) {
  *function = (CUfunction)((long long)module + 1);
  return CUDA_SUCCESS;
}

CUresult cuCtxGetCurrent(CUcontext *context) {
  *context = (CUcontext)1;
  return CUDA_SUCCESS;
}

CUresult cuCtxGetLimit(size_t *value, CUlimit limit) {
  *value = 1 << 20;
  return CUDA_SUCCESS;
}

CUresult cuDeviceGet(CUdevice *device, int ordinal) {
  *device = ordinal;
  return CUDA_SUCCESS;
}

CUresult cuCtxGetDevice(CUdevice *device) { return cuDeviceGet(device, 0); }

CUresult cuDevicePrimaryCtxRetain(CUcontext *context, CUdevice device) { return cuCtxGetCurrent(context); }

CUresult cuDriverGetVersion(int *version) {
  *version = 13000;
  return CUDA_SUCCESS;
}

CUresult cuStreamIsCapturing(CUstream stream, CUstreamCaptureStatus *status) {
  *status = CU_STREAM_CAPTURE_STATUS_NONE;
  return CUDA_SUCCESS;
}

CUresult cuGetErrorString(CUresult error, const char **text) {
  *text = "stands in";
  return CUDA_SUCCESS;
}

#define NOTHING(name, ...) \
  CUresult name(__VA_ARGS__) { return CUDA_SUCCESS; }

NOTHING(cuInit, unsigned int flags)
NOTHING(cuCtxSetCurrent, CUcontext context)
NOTHING(cuCtxSetLimit, CUlimit limit, size_t value)
NOTHING(cuFuncSetAttribute, CUfunction function, CUfunction_attribute attribute, int value)
NOTHING(cuFuncSetCacheConfig, CUfunction function, CUfunc_cache config)
NOTHING(cuModuleUnload, CUmodule module)
NOTHING(cuPointerGetAttributes, unsigned int n, CUpointer_attribute *kinds, void **data, CUdeviceptr pointer)
