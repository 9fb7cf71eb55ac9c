/* Compiles one OpenVINO model for one generation of Intel NPU: npu_compile.exe MODEL.xml OUT.blob PLATFORM
   Built for Windows, whose OpenVINO package is the one that has the NPU's compiler. */
#include <stdio.h>
#include <stdlib.h>
#include <windows.h>
#include <openvino/c/openvino.h>

/* Ends at once: unloading the plugin may hang where Windows is not real. */
static void finish(unsigned status) {
    fflush(NULL);
    TerminateProcess(GetCurrentProcess(), status);
}

static void require(ov_status_e status, const char *what) {
    if (status != OK) {
        const char *reason = ov_get_last_err_msg();
        fprintf(stderr, "%s failed (%s): %s\n", what, ov_get_error_info(status), reason ? reason : "no reason given");
        finish(EXIT_FAILURE);
    }
}

int main(int count, char **arguments) {
    ov_core_t *core = NULL;
    ov_model_t *model = NULL;
    ov_compiled_model_t *compiled = NULL;
    if (count != 4) {
        fprintf(stderr, "usage: %s MODEL.xml OUT.blob PLATFORM\n", arguments[0]);
        return EXIT_FAILURE;
    }
    require(ov_core_create(&core), "opening OpenVINO");
    require(ov_core_read_model(core, arguments[1], NULL, &model), "reading the model");
    /* Each property is two arguments of a variadic call; its count is that of the arguments. */
    require(ov_core_compile_model(core, model, "NPU", 4, &compiled, "NPU_PLATFORM", arguments[3],
                                  "NPU_COMPILER_TYPE", "PLUGIN"),
            "compiling");
    require(ov_compiled_model_export_model(compiled, arguments[2]), "writing the blob");
    finish(EXIT_SUCCESS);
}
