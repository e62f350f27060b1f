/* Opens the folder of a model: its objects, its weights, the libraries beside it.
 *
 * weights.bin is an int64_t, the number of offsets; an int64_t for each constant of the first plan in its order, then for each
 * constant of the next plan: the offset of its tensor in the file, a multiple of 64; then the tensors. sizes.bin says which
 * shapes each plan takes (korch_fit.c); the last of its numbers is a checksum of the others. */
#include "korch_runtime.h"

#include <limits.h>
#include <sys/syscall.h>
#include <unistd.h>

/* -- The CPU -------------------------------------------------------------------------------------------------------- */

const char *korch_missing_flag(const char *needed) {
    char found[8192] = "", flag[64];
    FILE *const file = fopen("/proc/cpuinfo", "re");
    while (file && fgets(found, sizeof found, file))
        if (strncmp(found, "flags", 5) == 0 || strncmp(found, "Features", 8) == 0) break;
    if (file) fclose(file);
    char *const end = strchr(found, '\n');
    if (end) *end = ' ';
    for (size_t size; (size = strcspn(needed, " ")); needed += size + 1) {
        snprintf(flag, sizeof flag, " %.*s ", (int)size, needed);
        if (!strstr(found, flag)) return needed;
    }
    return NULL;
}

int korch_matrix_units(void) {
#if defined(__x86_64__)
    enum { ASK = 0x1023, TILE_DATA = 18 }; /* ARCH_REQ_XCOMP_PERM, XFEATURE_XTILEDATA */
    static int may = -1;
    if (may < 0) may = !korch_missing_flag("amx_tile amx_bf16 amx_int8 ") && syscall(SYS_arch_prctl, ASK, TILE_DATA) == 0;
    return may;
#else
    return 0;
#endif
}

/* -- Files ---------------------------------------------------------------------------------------------------------- */

/* Read a file of a folder; if that fails, return null, with a message. */
static void *read_file(const char *folder, const char *name, int64_t *size, char *error, size_t error_size) {
    char path[PATH_MAX];
    snprintf(path, sizeof path, "%s/%s", folder, name);
    FILE *const file = fopen(path, "rb");
    void *bytes = NULL;
    if (file) {
        *size = fseek(file, 0, SEEK_END) == 0 ? ftell(file) : -1;
        rewind(file);
        if (*size >= 0) bytes = korch_allocate(*size);
        if (bytes && (int64_t)fread(bytes, 1, (size_t)*size, file) != *size) {
            korch_release(bytes);
            bytes = NULL;
        }
        fclose(file);
    }
    if (!bytes) snprintf(error, error_size, "can't read %s", path);
    return bytes;
}

/* -- Models --------------------------------------------------------------------------------------------------------- */

KORCH_API void korch_close(korch_model *model) {
    if (!model) return;
    korch_unload(model->code);
    korch_release(model->weights);
    free(model->constants);
    korch_release(model->numbers);
    free(model);
}

static bool load_code(korch_model *model, const char *folder, char *error, size_t error_size) {
    int64_t size;
    void *const bytes = read_file(folder, "kernels.a", &size, error, error_size);
    if (!bytes) return false;
    model->code = korch_load(0, bytes, size, error, error_size);
    korch_release(bytes);
    if (!model->code) return false;
    model->plans = korch_symbol(model->code, "korch_listed");
    const char *const missing = model->plans ? korch_missing_flag(model->plans->cpu_flags) : NULL;
    if (!model->plans) snprintf(error, error_size, "%s/kernels.a has no plans", folder);
    if (missing) snprintf(error, error_size, "%s needs a CPU with %.*s", folder, (int)strcspn(missing, " "), missing);
    return model->plans && !missing;
}

static bool load_weights(korch_model *model, const char *folder, char *error, size_t error_size) {
    int64_t size, needed = 0;
    for (int64_t i = 0; i < model->plans->count; ++i) needed += model->plans->rows[i]->constants.count;
    model->weights = read_file(folder, "weights.bin", &size, error, error_size);
    if (!model->weights) return false;
    model->constants = calloc((size_t)needed + 1, sizeof(void *));
    const int64_t *const offsets = (const int64_t *)model->weights;
    bool is_right = model->constants && size >= 8 && offsets[0] == needed && needed <= (size - 8) / 8;
    for (int64_t i = 0, at = 0; is_right && i < model->plans->count; ++i) {
        const korch_plan *const plan = model->plans->rows[i];
        for (int64_t k = 0; k < plan->constants.count && is_right; ++k, ++at) {
            const int64_t offset = offsets[1 + at], own_bytes = plan->constants.rows[k].size_bytes;
            is_right = offset >= 0 && offset % 64 == 0 && offset <= size && own_bytes <= size - offset;
            model->constants[at] = model->weights + offset;
        }
    }
    if (!is_right) snprintf(error, error_size, "%s/weights.bin has not the weights of these plans", folder);
    return is_right;
}

/* Read sizes.bin, whose numbers are used without further checks. */
static bool load_sizes(korch_model *model, const char *folder, char *error, size_t error_size) {
    int64_t size;
    model->numbers = read_file(folder, "sizes.bin", &size, error, error_size);
    if (!model->numbers) return false;
    uint64_t sum = 1469598103934665603u; /* as of FNV-1a, but of numbers instead of bytes */
    for (int64_t i = 0; i < size / 8 - 1; ++i) sum = (sum ^ (uint64_t)model->numbers[i]) * 1099511628211u;
    const bool is_right = size >= 16 && size % 8 == 0 && (uint64_t)model->numbers[size / 8 - 1] == sum;
    if (!is_right) snprintf(error, error_size, "%s/sizes.bin is damaged", folder);
    return is_right;
}

KORCH_API korch_model *korch_open(const char *folder, char *error, size_t error_size) {
    char path[PATH_MAX];
    korch_model *const model = calloc(1, sizeof *model);
    if (!model) {
        snprintf(error, error_size, "out of memory");
        return NULL;
    }
    snprintf(path, sizeof path, "%s/%s", folder, KORCH_ONNXRUNTIME);
    if (access(path, R_OK) == 0) korch_use_onnxruntime(path);
    if (load_code(model, folder, error, error_size) && load_weights(model, folder, error, error_size) &&
        load_sizes(model, folder, error, error_size))
        return model;
    korch_close(model);
    return NULL;
}
