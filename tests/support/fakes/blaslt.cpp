/* A stand-in for cuBLASLt (default) or hipBLASLt (-DAMD) that computes float, bf16 and e4m3 matrices on the host,
 * column-major, from the descriptors it is given. Attribute numbers are written out here once more, from the vendors' headers. */
#include <cmath>
#include <cstdint>
#include <cstring>
#include <map>
#include <string>
#include <vector>

#ifdef AMD
#define F(name) hipblasLt##name
enum { TRANS = 112, DESC_TA = 0, DESC_TB = 1, DESC_EPILOGUE = 2, DESC_BIAS = 3, DESC_BIAS_TYPE = 4, DESC_SCALE_A = 5, DESC_SCALE_B = 6,
       LAYOUT_BATCH = 0, LAYOUT_OFFSET = 1, NOT_SUPPORTED = 7, ALGO = 24 };
#else
#define F(name) cublasLt##name
enum { TRANS = 1, DESC_TA = 3, DESC_TB = 4, DESC_EPILOGUE = 7, DESC_BIAS = 8, DESC_BIAS_TYPE = 26, DESC_SCALE_A = 17, DESC_SCALE_B = 18,
       LAYOUT_BATCH = 5, LAYOUT_OFFSET = 6, NOT_SUPPORTED = 15, ALGO = 64 };
#endif

int fake_none, fake_fail, fake_alive, fake_revision = 1, fake_matmuls, fake_compute;
static const char *NAMES[] = {"Cijk_MT64x32x16_GSU1", "Cijk_MT128x256x64_a_long_name_on_the_heap_GSU4", "Cijk_third"};

struct Attributes { std::map<int, std::vector<char>> held; };
struct Layout : Attributes { int type; uint64_t rows, cols; int64_t ld; };
struct Desc : Attributes { int compute, scale; };
template <class T> static T get(const Attributes *from, int key, T otherwise) {
  auto found = from->held.find(key);
  if (found != from->held.end()) memcpy(&otherwise, found->second.data(), sizeof otherwise);
  return otherwise;
}
static int set(Attributes *on, int key, const void *value, size_t size) {
  on->held[key].assign((const char *)value, (const char *)value + size);
  return 0;
}

/* one element of a matrix of float (0), bf16 (14), e4m3fn (28) or e4m3fnuz (1000) */
static float load(int type, const void *from, uint64_t at) {
  if (type == 14) {
    uint32_t bits = (uint32_t)((const uint16_t *)from)[at] << 16;
    float value;
    return memcpy(&value, &bits, 4), value;
  }
  if (type != 28 && type != 1000) return ((const float *)from)[at];
  uint8_t byte = ((const uint8_t *)from)[at], exponent = byte >> 3 & 15;
  float part = (byte & 7) / 8.f, value = exponent ? ldexpf(1 + part, exponent - 7) : ldexpf(part, -6);
  return (byte & 128 ? -value : value) * (type == 1000 ? 0.5f : 1);
}
static void store(int type, void *to, uint64_t at, float value) {
  if (type != 14) return (void)(((float *)to)[at] = value);
  uint32_t bits;
  memcpy(&bits, &value, 4);
  ((uint16_t *)to)[at] = (bits + 0x7fff + (bits >> 16 & 1)) >> 16;
}
static uint64_t bytes_of(int type) { return type == 14 ? 2 : type == 28 || type == 1000 ? 1 : 4; }

/* the factor of a row of op(A) or a column of op(B), of `count`, at one place along K of `depth` */
static float factor(const float *scales, int mode, uint64_t row, uint64_t count, uint64_t k, uint64_t depth) {
  if (!scales) return 1;
  uint64_t groups = (depth + 127) / 128, padded = (groups + 3) / 4 * 4;
  return scales[mode == 3 ? row : mode == 4 ? k / 128 * count + row : mode == 5 ? row / 128 * padded + k / 128 : 0];
}

typedef struct { unsigned char algo[ALGO]; size_t workspace; int status; float waves; int reserved[4]; } Result;

extern "C" {
int F(Create)(void **handle) { return *handle = new int(7), 0; }
int F(MatmulDescCreate)(Desc **d, int compute, int scale) {
  *d = new Desc;
  (*d)->compute = compute, (*d)->scale = scale;
  return fake_alive++, 0;
}
int F(MatmulDescDestroy)(Desc *d) { return delete d, fake_alive--, 0; }
int F(MatmulDescSetAttribute)(Desc *d, int key, const void *v, size_t size) { return set(d, key, v, size); }
int F(MatrixLayoutCreate)(Layout **l, int type, uint64_t rows, uint64_t cols, int64_t ld) {
  *l = new Layout;
  (*l)->type = type, (*l)->rows = rows, (*l)->cols = cols, (*l)->ld = ld;
  return fake_alive++, 0;
}
int F(MatrixLayoutDestroy)(Layout *l) { return delete l, fake_alive--, 0; }
int F(MatrixLayoutSetAttribute)(Layout *l, int key, const void *v, size_t size) { return set(l, key, v, size); }
int F(MatmulPreferenceCreate)(Attributes **p) { return *p = new Attributes, fake_alive++, 0; }
int F(MatmulPreferenceDestroy)(Attributes *p) { return delete p, fake_alive--, 0; }
int F(MatmulPreferenceSetAttribute)(Attributes *p, int key, const void *v, size_t size) { return set(p, key, v, size); }

static void algorithm(unsigned char *algo, int which) {
  memset(algo, 0, ALGO);
  int words[] = {which, 20 + which, 16, 1};
  memcpy(algo, words, sizeof(int) * (ALGO == 24 ? 1 : 4));
}
/* two good ones, the first again, one that failed, one that needs too much */
int F(MatmulAlgoGetHeuristic)(void *, Desc *, Layout *a, Layout *, Layout *, Layout *, Attributes *p, int requested,
                              Result *results, int *count) {
  if (fake_none) return NOT_SUPPORTED;
  uint64_t most = get<uint64_t>(p, 1, 0);
  int which[] = {1, 2, 1, 3, 4};
  for (*count = 0; *count < 5 && *count < requested; ++*count) {
    Result *r = results + *count;
    memset(r, 0, sizeof *r);
    algorithm(r->algo, which[*count]);
    r->status = which[*count] == 3 ? NOT_SUPPORTED : 0;
    r->workspace = which[*count] == 4 ? most + 1 : 16;
  }
  return 0;
}

int F(Matmul)(void *handle, Desc *desc, const float *alpha, const char *A, Layout *la, const char *B, Layout *lb,
              const float *beta, const char *C, Layout *lc, char *D, Layout *ld, const void *algo, void *workspace,
              size_t bytes, void *) {
  if (*(int *)handle != 7 || !workspace || bytes != 16) return 3;
  if (fake_fail) return fake_fail;
  ++fake_matmuls, fake_compute = desc->compute;
  bool ta = get<int>(desc, DESC_TA, 0) == TRANS, tb = get<int>(desc, DESC_TB, 0) == TRANS;
  void *bias = get<int>(desc, DESC_EPILOGUE, 1) == 4 ? get<void *>(desc, DESC_BIAS, nullptr) : nullptr;
  float *sa = get<float *>(desc, DESC_SCALE_A, nullptr), *sb = get<float *>(desc, DESC_SCALE_B, nullptr);
  int mode_a = get<int>(desc, 31, 0), mode_b = get<int>(desc, 32, 0);
  uint64_t depth = ta ? la->rows : la->cols;
  if (depth != (tb ? lb->cols : lb->rows) || ld->rows != (ta ? la->cols : la->rows)) return 3;
  for (int batch = 0; batch < get<int>(ld, LAYOUT_BATCH, 1); ++batch) {
    const char *a = A + batch * get<int64_t>(la, LAYOUT_OFFSET, 0) * bytes_of(la->type);
    const char *b = B + batch * get<int64_t>(lb, LAYOUT_OFFSET, 0) * bytes_of(lb->type);
    const char *c = C + batch * get<int64_t>(lc, LAYOUT_OFFSET, 0) * bytes_of(lc->type);
    char *d = D + batch * get<int64_t>(ld, LAYOUT_OFFSET, 0) * bytes_of(ld->type);
    for (uint64_t j = 0; j < ld->cols; ++j)
      for (uint64_t i = 0; i < ld->rows; ++i) {
        float sum = 0;
        for (uint64_t k = 0; k < depth; ++k)
          sum += load(la->type, a, ta ? k + i * la->ld : i + k * la->ld) * factor(sa, mode_a, i, ld->rows, k, depth) *
                 load(lb->type, b, tb ? j + k * lb->ld : k + j * lb->ld) * factor(sb, mode_b, j, ld->cols, k, depth);
        sum = *alpha * sum + (bias ? load(get<int>(desc, DESC_BIAS_TYPE, 0), bias, i) : 0);
        store(ld->type, d, i + j * ld->ld, sum + (*beta ? *beta * load(lc->type, c, i + j * lc->ld) : 0));
      }
  }
  return 0;
}

#ifndef AMD
const char *cublasLtGetStatusName(int s) { return s == 15 ? "CUBLAS_STATUS_NOT_SUPPORTED" : "CUBLAS_STATUS_EXECUTION_FAILED"; }
size_t cublasLtGetVersion() { return 130100; }
static int place(int attribute) { return attribute == 0 ? 0 : attribute == 1 ? 1 : attribute == 6 ? 2 : attribute == 2 ? 3 : -1; }
int cublasLtMatmulAlgoConfigGetAttribute(const int *algo, int attribute, void *value, size_t size, size_t *) {
  int at = place(attribute), none = 0;
  return memcpy(value, at < 0 ? &none : algo + at, size), 0;
}
int cublasLtMatmulAlgoConfigSetAttribute(int *algo, int attribute, const void *value, size_t size) {
  if (place(attribute) >= 0) memcpy(algo + place(attribute), value, size);
  return 0;
}
int cublasLtMatmulAlgoInit(void *, int, int, int, int, int, int, int id, int *algo) {
  return memset(algo, 0, ALGO), *algo = id, id > 9 ? NOT_SUPPORTED : 0;
}
/* split-K and tiles 15, 21, 22 and 23, of which the check refuses 23 */
int cublasLtMatmulAlgoCapGetAttribute(const int *algo, int capability, void *value, size_t size, size_t *written) {
  unsigned tiles[] = {15, 21, 22, 23};
  int known = capability == 0 ? 1 : capability == 1 ? 2 : 0;
  if (capability == 6) return *written = sizeof tiles, size ? (memcpy(value, tiles, size), 0) : 0;
  if (capability == 13) return 7;
  return *written = 4, memcpy(value, &known, 4), 0;
}
int cublasLtMatmulAlgoCheck(void *, Desc *, Layout *, Layout *, Layout *, Layout *, const int *algo, Result *r) {
  return r->workspace = 16, algo[1] == 23 ? NOT_SUPPORTED : 0;
}
#else
int hipblasLtGetVersion(void *, int *v) { return *v = 100000, 0; }
int hipblasLtGetGitRevision(void *, char *text) { return strcpy(text, fake_revision == 1 ? "8d1ae90e" : "feed0bad"), 0; }
#endif
}

#ifdef AMD
/* the C++ side: types named as hipBLASLt names them, so that the compiler makes the names the library has */
enum hipblasStatus_t { SUCCESS, NO = 7 };
enum hipblasOperation_t { OP_N = 111 };
enum hipDataType { R_32F };
enum hipblasComputeType_t { COMPUTE };
struct _hipblasLtMatmulAlgo_t { uint8_t data[16]; size_t most; };
struct _hipblasLtMatmulHeuristicResult_t {
  _hipblasLtMatmulAlgo_t algo;
  size_t workspace;
  hipblasStatus_t status;
  float waves;
  int reserved[4];
};
struct hipblasLtMatmulDescOpaque_t;
struct hipblasLtMatrixLayoutOpaque_t;
namespace hipblaslt_ext {
enum class GemmType { GEMM = 1 };
typedef std::vector<_hipblasLtMatmulHeuristicResult_t> Results;
static void add(Results &results, int which) {
  _hipblasLtMatmulHeuristicResult_t one = {};
  algorithm((unsigned char *)&one.algo, which);
  results.push_back(one);
}
/* solutions 0 to 5: the heuristics know 1 and 2, number 3 does not fit, number 5 has no name */
hipblasStatus_t getAllAlgos(void *, GemmType type, hipblasOperation_t, hipblasOperation_t, hipDataType, hipDataType,
                            hipDataType, hipDataType, hipblasComputeType_t, Results &results) {
  for (int i = 0; i < 6; ++i) add(results, i);
  return type == GemmType::GEMM ? SUCCESS : NO;
}
hipblasStatus_t getAlgosFromIndex(void *, std::vector<int> &indices, Results &results) {
  for (int i : indices)
    if (i >= 0 && i < 6) add(results, i);
  return results.empty() ? NO : SUCCESS;
}
hipblasStatus_t matmulIsAlgoSupported(void *, hipblasLtMatmulDescOpaque_t *, const void *, hipblasLtMatrixLayoutOpaque_t *,
                                      hipblasLtMatrixLayoutOpaque_t *, const void *, hipblasLtMatrixLayoutOpaque_t *,
                                      hipblasLtMatrixLayoutOpaque_t *, _hipblasLtMatmulAlgo_t &algo, size_t &workspace) {
  int which;
  memcpy(&which, &algo, 4);
  return workspace = 16, which == 3 ? NO : SUCCESS;
}
std::string getKernelNameFromAlgo(void *, _hipblasLtMatmulAlgo_t &algo) {
  int which;
  memcpy(&which, &algo, 4);
  return which == 5 ? "" : NAMES[(which + fake_revision) % 3] + std::string(which > 2 ? "_more" : "");
}
std::string getSolutionNameFromAlgo(void *, _hipblasLtMatmulAlgo_t &) { return ""; }
}  // namespace hipblaslt_ext
#endif
