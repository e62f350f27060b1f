/* Opens the folder of a model: its objects for the best instruction set of this CPU, its weights, the libraries beside it.
 *
 * The objects for an instruction set are one file, `kernels-<instruction set>.a`, in the format of `ar`. weights.bin is an
 * int64_t, the number of offsets; an int64_t for each constant of the first plan in its order, then for
 * each constant of the next plan: the offset of its tensor in the file, a multiple of 64; then the tensors. sizes.bin says which
 * shapes each plan takes (korch_fit.c). */
#include "korch_runtime.h"

#include <sys/syscall.h>
#include <unistd.h>
#if defined(__x86_64__)
#include <cpuid.h>
#else
#include <asm/hwcap.h>
#include <sys/auxv.h>
#endif

/* -- Instruction sets ----------------------------------------------------------------------------------------------- */

int korch_matrix_units(void) {
#if defined(__x86_64__)
    enum { ASK = 0x1023, TILE_DATA = 18 };                       /* ARCH_REQ_XCOMP_PERM, XFEATURE_XTILEDATA */
    const unsigned bfloat16 = 1u << 22, int8 = 1u << 25; /* EDX of leaf 7: a machine may report tiles without these */
    static int may = -1;
    unsigned a = 0, b = 0, c = 0, d = 0;
    if (may < 0)
        may = __get_cpuid_count(7, 0, &a, &b, &c, &d) && (d & bfloat16) && (d & int8) &&
              syscall(SYS_arch_prctl, ASK, TILE_DATA) == 0;
    return may;
#else
    return 0;
#endif
}

#if defined(__x86_64__)
/* The best first. Kernels for amx check for matrix units and work without them. */
static const char *const isas[] = {"amx", "avx512_bf16", "avx512_vnni", "avx512", "avx2", "generic"};

/* Which of them this CPU has and the system lets programs use, as bits. */
static int usable_isas(void) {
    unsigned a = 0, b = 0, c = 0, d = 0, low = 0, high = 0;
    const unsigned fma = 1u << 12, xsave = 1u << 27, avx = 1u << 28, f16c = 1u << 29;
    const unsigned needed = fma | xsave | avx | f16c, avx2 = 1u << 5 | 1u << 3 | 1u << 8; /* with BMI1 and BMI2 */
    const unsigned avx512 = 1u << 16 | 1u << 17 | 1u << 28 | 1u << 30 | 1u << 31;         /* F, DQ, CD, BW, VL */
    if (!__get_cpuid(1, &a, &b, &c, &d) || (c & needed) != needed) return 32;
    __asm__("xgetbv" : "=a"(low), "=d"(high) : "c"(0));
    if (!__get_cpuid_count(7, 0, &a, &b, &c, &d) || (b & avx2) != avx2 || (low & 6) != 6) return 32;
    if ((b & avx512) != avx512 || (low & 0xe6) != 0xe6) return 48;
    if (!(c & 1u << 11)) return 56;
    const bool has_bf16 = __get_cpuid_count(7, 1, &a, &b, &c, &d) && (a & 1u << 5);
    return has_bf16 ? 63 : 61;
}
#else
static const char *const isas[] = {"neon_bf16", "neon_dot", "neon", "generic"};
static int usable_isas(void) {
    const unsigned long dot = getauxval(AT_HWCAP) & HWCAP_ASIMDDP, both = HWCAP2_I8MM | HWCAP2_BF16;
    return !dot ? 12 : (getauxval(AT_HWCAP2) & both) == both ? 15 : 14;
}
#endif

/* -- Files ---------------------------------------------------------------------------------------------------------- */

enum { PATH_BYTES = 4096 };

static const char *path_of(char *path, const char *folder, const char *name) {
    snprintf(path, PATH_BYTES, "%s/%s", folder, name);
    return path;
}

static void *read_file(const char *path, int64_t *size) {
    FILE *const file = fopen(path, "rb");
    if (!file) return NULL;
    *size = fseek(file, 0, SEEK_END) == 0 ? ftell(file) : -1;
    rewind(file);
    void *bytes = *size >= 0 ? korch_allocate(*size) : NULL;
    if (bytes && (int64_t)fread(bytes, 1, (size_t)*size, file) != *size) {
        free(bytes);
        bytes = NULL;
    }
    fclose(file);
    return bytes;
}

/* -- Models --------------------------------------------------------------------------------------------------------- */

KORCH_API void korch_close(korch_model *model) {
    if (!model) return;
    korch_unload(model->code);
    free(model->weights);
    free(model->constants);
    free(model->numbers);
    free(model);
}

static bool load_code(korch_model *model, const char *folder, char *error, size_t error_size) {
    char path[PATH_BYTES], name[64];
    int64_t size;
    const int usable = usable_isas();
    for (int i = 0; i < (int)(sizeof isas / sizeof *isas); ++i) {
        if (!(usable >> i & 1)) continue;
        snprintf(name, sizeof name, "kernels-%s.a", isas[i]);
        void *const bytes = read_file(path_of(path, folder, name), &size);
        if (!bytes) continue;
        model->code = korch_load(0, bytes, size, error, error_size);
        free(bytes);
        model->plans = model->code ? korch_symbol(model->code, "korch_listed") : NULL;
        if (model->code && !model->plans) snprintf(error, error_size, "%s has no plans", path);
        return model->plans;
    }
    snprintf(error, error_size, "%s has no kernels for this CPU", folder);
    return false;
}

static bool load_weights(korch_model *model, const char *folder, char *error, size_t error_size) {
    char path[PATH_BYTES];
    int64_t size, needed = 0;
    for (int64_t i = 0; i < model->plans->count; ++i) needed += model->plans->rows[i]->constants.count;
    model->weights = read_file(path_of(path, folder, "weights.bin"), &size);
    model->constants = calloc((size_t)needed + 1, sizeof(void *));
    const int64_t *const offsets = (const int64_t *)model->weights;
    bool is_right = offsets && model->constants && size >= 8 && offsets[0] == needed && needed <= (size - 8) / 8;
    for (int64_t i = 0, at = 0; is_right && i < model->plans->count; ++i) {
        const korch_plan *const plan = model->plans->rows[i];
        for (int64_t k = 0; k < plan->constants.count && is_right; ++k, ++at) {
            const int64_t offset = offsets[1 + at], own_bytes = plan->constants.rows[k].size_bytes;
            is_right = offset >= 0 && offset % 64 == 0 && offset <= size && own_bytes <= size - offset;
            model->constants[at] = model->weights + offset;
        }
    }
    if (!is_right) snprintf(error, error_size, "%s has not the weights of these plans", path);
    return is_right;
}

KORCH_API korch_model *korch_open(const char *folder, char *error, size_t error_size) {
    char path[PATH_BYTES];
    korch_model *const model = calloc(1, sizeof *model);
    if (!model) {
        snprintf(error, error_size, "out of memory");
        return NULL;
    }
    if (access(path_of(path, folder, KORCH_ONNXRUNTIME), R_OK) == 0) korch_use_onnxruntime(path);
    if (load_code(model, folder, error, error_size) && load_weights(model, folder, error, error_size)) {
        int64_t size;
        model->numbers = read_file(path_of(path, folder, "sizes.bin"), &size);
        if (model->numbers) return model;
        snprintf(error, error_size, "can't read %s", path);
    }
    korch_close(model);
    return NULL;
}
