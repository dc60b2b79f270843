//! `cost` of a layer against the memory that its passes hold, and against what the allocator counts.

use candle_core::{DType, Storage, Tensor};

use super::super::{Layer, Mode};
use super::{
    TestContext, frozen_registry, is_reference_under_test, measures_costs_only, on_test_backend,
    random_tensor, test_spec,
};
use crate::base::{Backend, HOPPER, MicroBatchSpec};
use crate::memory::measure;
use crate::params::ParamRegistry;

/// Address and size of the memory behind a tensor.
fn storage_span(t: &Tensor) -> (usize, u64) {
    let (storage, _) = t.storage_and_layout();
    match &*storage {
        Storage::Cpu(cpu) => {
            macro_rules! of {
                ($($variant:ident),*) => {
                    match cpu {
                        $(candle_core::CpuStorage::$variant(v) => {
                            (v.as_ptr() as usize, size_of_val(v.as_slice()) as u64)
                        })*
                        _ => panic!("an unexpected type"),
                    }
                };
            }
            of!(F32, F64, BF16, F16, U8, U32)
        }
        #[cfg(feature = "cuda")]
        Storage::Cuda(cuda) => {
            use candle_core::cuda_backend::CudaStorageSlice;
            use candle_core::cuda_backend::cudarc::driver::DevicePtr;
            macro_rules! of {
                ($($variant:ident),*) => {
                    match &cuda.slice {
                        $(CudaStorageSlice::$variant(v) => {
                            (v.device_ptr(v.stream()).0 as usize, v.num_bytes() as u64)
                        })*
                        _ => panic!("an unexpected type"),
                    }
                };
            }
            of!(F32, F64, BF16, F16, U8, U32, I64)
        }
        _ => panic!("a device without tests"),
    }
}

/// Checks that `cost` matches exactly what `forward` holds, at three batch sizes and in three types, with all
/// parameters trained and, if there are any, with some or all of them frozen.
pub fn check_cost(build: &dyn Fn(&mut ParamRegistry) -> Box<dyn Layer>, input: &dyn Fn(usize) -> Tensor) {
    check_cost_of_trained(build, input);
    let mut registry = ParamRegistry::default();
    build(&mut registry);
    if registry.into_layout().unwrap().params.len == 0 {
        return;
    }
    for frozen in ["*", "*.weight", "*.bias"] {
        let build = |registry: &mut ParamRegistry| {
            *registry = frozen_registry(&[frozen]);
            build(registry)
        };
        check_cost_of_trained(&build, input);
    }
}

fn check_cost_of_trained(
    build: &dyn Fn(&mut ParamRegistry) -> Box<dyn Layer>,
    input: &dyn Fn(usize) -> Tensor,
) {
    for (batch, dtype) in
        [(1, DType::F32), (3, DType::F32), (8, DType::F32), (3, DType::BF16), (3, DType::F64)]
    {
        if dtype == DType::BF16 && is_reference_under_test() {
            continue; // As in `check_bf16`.
        }
        let mut registry = ParamRegistry::default();
        let layer = build(&mut registry);
        let (layer, _scope) = on_test_backend(layer, &registry);
        let subject = TestContext::new(registry, dtype, batch);
        let x = input(batch);
        let differentiable = x.dtype() == DType::F64;
        let x = if differentiable { x.to_dtype(dtype).unwrap().copy().unwrap() } else { x };
        let spec = test_spec(batch, dtype);
        let cost = layer.cost(spec);
        let (y, saved) = layer.forward(&x, &subject.pass(Mode::Train)).unwrap();
        let ((x_ptr, x_bytes), (y_ptr, y_bytes)) = (storage_span(&x), storage_span(&y));
        let (name, mut counted, mut extra) = (layer.name(), Vec::new(), 0);
        let (mut kept_x, mut kept_y) = (false, false);
        for (ptr, bytes) in saved.0.iter().map(storage_span) {
            kept_x |= ptr == x_ptr;
            kept_y |= ptr == y_ptr && ptr != x_ptr;
            if ptr != x_ptr && ptr != y_ptr && !counted.contains(&ptr) {
                counted.push(ptr);
                extra += bytes;
            }
        }
        assert_eq!(
            cost.saved, extra,
            "{name}: bytes saved beside input and output, batch {batch}, {dtype:?}"
        );
        assert_eq!(cost.saves_input, kept_x, "{name}: saves its input");
        if cost.saves_input {
            assert_eq!(storage_span(&saved.0[0]).0, x_ptr, "{name}: the input is the first it saves");
        }
        assert_eq!(cost.saves_output, kept_y, "{name}: saves its output");
        assert_eq!(cost.output_is_view, x_ptr == y_ptr, "{name}: output is a view");
        assert_eq!(cost.output, if cost.output_is_view { 0 } else { y_bytes }, "{name}: output bytes");
        if differentiable && !cost.output_is_view {
            assert_eq!(cost.input_grad, x_bytes, "{name}: bytes of the input's gradient");
        }
        check_cost_is_monotonic(&*layer, dtype);
    }
    if measures_costs_only() {
        [DType::F32, DType::BF16].into_iter().for_each(|dtype| check_measured_cost(build, input, dtype));
    }
}

/// Compares the cost of a large micro-batch with what the allocator counts while the passes run.
fn check_measured_cost(
    build: &dyn Fn(&mut ParamRegistry) -> Box<dyn Layer>,
    input: &dyn Fn(usize) -> Tensor,
    dtype: DType,
) {
    /// Tensors without their values, lists of tasks.
    const SMALL_OBJECTS: u64 = 8 << 10;
    const BATCH: usize = 96;
    const MEASUREMENTS: usize = 5;
    let mut registry = ParamRegistry::default();
    let layer = build(&mut registry);
    let (layer, _scope) = on_test_backend(layer, &registry);
    let subject = TestContext::new(registry, dtype, BATCH);
    let (x, pass) = (input(BATCH), subject.pass(Mode::Train));
    let differentiable = x.dtype() == DType::F64;
    let x = if differentiable { x.to_dtype(dtype).unwrap().copy().unwrap() } else { x };
    let spec = test_spec(BATCH, dtype);
    let cost = layer.cost(spec);
    // The first pass allocates what is kept for the next ones, such as the buffers of threads.
    let (y, saved) = layer.forward(&x, &pass).unwrap();
    let dy = random_tensor(y.dims(), 17).to_dtype(dtype).unwrap();
    layer.backward(saved, dy.copy().unwrap(), &pass, differentiable).unwrap();
    drop(y);
    let peak_of = |work: &mut dyn FnMut()| {
        measure::take_recent_peak();
        let before = measure::live_bytes();
        work();
        measure::take_recent_peak().saturating_sub(before)
    };
    // A pass allocates the same every time; what the test runner and the thread pool allocate now and then is not in
    // the smallest of the measurements.
    let (mut forward, mut backward) = (u64::MAX, u64::MAX);
    for _ in 0..MEASUREMENTS {
        let mut outcome = None;
        forward = forward.min(peak_of(&mut || outcome = Some(layer.forward(&x, &pass).unwrap())));
        let (y, saved) = outcome.unwrap();
        drop(y);
        let (mut saved, mut dy) = (Some(saved), Some(dy.copy().unwrap()));
        backward = backward.min(peak_of(&mut || {
            layer.backward(saved.take().unwrap(), dy.take().unwrap(), &pass, differentiable).unwrap();
        }));
    }
    let per_thread = {
        let on = |threads| layer.cost(MicroBatchSpec { backend: Backend::Cpu { threads }, ..spec });
        on(1) != on(64) || spec.backend.is_reference()
    };
    let stated = [
        ("forward", cost.output + cost.saved + cost.forward_workspace, forward),
        (
            "backward",
            if differentiable { cost.input_grad } else { 0 } + cost.workspace_of_backward(differentiable),
            backward,
        ),
    ];
    for (what, stated, measured) in stated {
        let name = layer.name();
        println!("cost {name} {what} {dtype:?} {stated} {measured}");
        // In these cases `cost` is an upper bound: not every thread takes part in every pass, and GEMMs convert no more
        // than they must.
        let is_bound = per_thread || dtype != DType::F32;
        let is_above = measured > stated + SMALL_OBJECTS;
        let is_close = !is_above && (is_bound || stated <= measured + measured / 5 + SMALL_OBJECTS);
        assert!(is_close, "{name}: {what} takes {measured} bytes, and `cost` states {stated}; {dtype:?}");
    }
}

/// The plan assumes full micro-batches, and the last one of an epoch may be smaller: it must not need more memory.
fn check_cost_is_monotonic(layer: &dyn Layer, dtype: DType) {
    // The threads' work lists may be longer if the batch divides unevenly.
    const WORK_LIST_SLACK: u64 = 4096;
    let cpu = [1, 2, 3, 4, 7, 16].map(|threads| Backend::Cpu { threads });
    let gpu = [(8, 0), HOPPER].map(|capability| Backend::Cuda { capability });
    for backend in cpu.into_iter().chain(gpu) {
        let mut max_bytes = [0, 0];
        for batch in 1..=40 {
            let cost = layer.cost(MicroBatchSpec { batch, dtype, backend });
            let held = cost.output + cost.saved;
            for (max_so_far, (phase, bytes)) in max_bytes.iter_mut().zip([
                ("forward", held + cost.forward_workspace),
                ("backward", held + cost.input_grad + cost.workspace_of_backward(true)),
            ]) {
                let name = layer.name();
                assert!(
                    bytes + WORK_LIST_SLACK >= *max_so_far,
                    "{name}: {phase}: {bytes} bytes for {batch} samples, {max_so_far} for fewer; {dtype:?}, {backend:?}"
                );
                *max_so_far = bytes.max(*max_so_far);
            }
        }
    }
}
