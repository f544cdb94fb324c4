//! A GPU that hangs or fails ends the process with a code of its own, and says why.

use std::process::Command;
use std::time::Duration;

use cudarc::driver::sys;
use thalweg_worker::backend::cuda::launch::{Args, Grid, Kernel, Launcher};
use thalweg_worker::backend::cuda::{CudaBackendConfig, FAULT_EXIT_CODE, OnFault};
use thalweg_worker::plan::{RowInput, StepPlan, Want};
use thalweg_worker::runner::Runner;
use thalweg_worker::sampling::SamplingParams;

use crate::models::{config, load, row, runner, start, tiny};

/// Set in the processes that are meant to end.
const CHILD: &str = "THALWEG_TEST_GPU_FAULT";
/// How long the hanging kernel takes at most: a GPU that others use too is not lost for ever.
const HANG: Duration = Duration::from_secs(40);
const STEP_TIMEOUT: Duration = Duration::from_secs(2);

/// One keeps a multiprocessor busy for so many nanoseconds, the other writes to an address.
const KERNELS: &str = "
.version 7.0
.target sm_80
.address_size 64

.visible .entry hang(.param .u64 nanoseconds) {
    .reg .pred %again;
    .reg .u64 %begin, %now, %limit;
    ld.param.u64 %limit, [nanoseconds];
    mov.u64 %begin, %globaltimer;
WAIT:
    mov.u64 %now, %globaltimer;
    sub.u64 %now, %now, %begin;
    setp.lt.u64 %again, %now, %limit;
    @%again bra WAIT;
    ret;
}

.visible .entry stray(.param .u64 address) {
    .reg .u64 %at;
    ld.param.u64 %at, [address];
    st.global.u64 [%at], %at;
    ret;
}
";

#[test]
fn a_hung_kernel_ends_the_process() {
    check("hang", &["a kernel hangs", "no answer from the GPU for 2 s", "--gpu-step-timeout"]);
}

#[test]
fn an_illegal_address_ends_the_process() {
    check("stray", &["CUDA_ERROR_ILLEGAL_ADDRESS"]);
}

fn check(kernel: &str, parts: &[&str]) {
    let begin = tokio::time::Instant::now();
    let mut child = Command::new(std::env::current_exe().expect("this program"));
    child.args(["--exact", "faults::in_a_process_of_its_own", "--nocapture"]).env(CHILD, kernel);
    let output = child.output().expect("a process");
    let said = String::from_utf8_lossy(&output.stderr);
    println!("{kernel}: {} after {:.1} s, {said}", output.status, begin.elapsed().as_secs_f64());
    assert_eq!(output.status.code(), Some(FAULT_EXIT_CODE), "{said}");
    for part in ["the GPU is lost, this process ends", "exit_code=70"].iter().chain(parts) {
        assert!(said.contains(part), "{said:?} does not say {part:?}");
    }
    assert!(begin.elapsed() < HANG, "it waited for the kernel");
}

/// Does nothing unless a test above started this process.
#[test]
fn in_a_process_of_its_own() {
    let Ok(name) = std::env::var(CHILD) else { return };
    tracing_subscriber::fmt().with_writer(std::io::stderr).with_ansi(false).init();
    let fatal = CudaBackendConfig { step_timeout: STEP_TIMEOUT, on_fault: OnFault::EndProcess, ..config(1) };
    let mut runner = runner(&load(&tiny("llama3")), fatal);
    let argument = if name == "hang" { HANG.as_nanos() as u64 } else { 64 };
    let launcher = Launcher { stream: runner.device().stream(), overlapped: false };
    // SAFETY: the one reads nothing; the other fails, as it is meant to.
    unsafe { launcher.launch(kernel(&name), Grid::of(1, 1), Args::new().u64(argument)) }.expect("a launch");
    let rows = vec![row(0, RowInput::Tokens(vec![1, 2, 3]), 0, Want::Sample { output_index: 0 })];
    let plan = StepPlan { slots: vec![start(0, SamplingParams::greedy())], rows, ..StepPlan::default() };
    let step = runner.submit(plan).expect("the process ends before it is told");
    let output = runner.collect(step);
    panic!("the process goes on: {output:?}");
}

fn kernel(name: &str) -> Kernel {
    let text = std::ffi::CString::new(KERNELS).expect("no zeros");
    let entry = std::ffi::CString::new(name).expect("no zeros");
    let (mut module, mut function) = (std::ptr::null_mut(), std::ptr::null_mut());
    // SAFETY: texts that end with zero; the module stays for as long as the process.
    let loaded = unsafe {
        assert_eq!(sys::cuModuleLoadData(&raw mut module, text.as_ptr().cast()), sys::CUresult::CUDA_SUCCESS);
        sys::cuModuleGetFunction(&raw mut function, module, entry.as_ptr())
    };
    assert_eq!(loaded, sys::CUresult::CUDA_SUCCESS);
    Kernel { function, name: "a test's" }
}
