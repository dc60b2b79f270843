//! The proof every layer goes through: gradients against central differences in f64 and against candle's
//! autograd on the kernel's reference, and the cost against what the passes really hold.

use candle_core::{DType, Device, Storage, Tensor, Var};

use super::loss::{Counted, Loss};
use super::{Along, At, HOPPER, Layer, Mode, On, Pass, Remakes};
use crate::kernels::update::round_into;
use crate::params::{Declared, Store};
use crate::random::{Random, stream};

/// Where the proofs run: on the CPU, or on the first card where `TRAINER_TEST_DEVICE` is `cuda`.
pub fn device() -> Device {
    #[cfg(feature = "cuda")]
    if std::env::var("TRAINER_TEST_DEVICE").is_ok_and(|device| device == "cuda") {
        static CARD: std::sync::OnceLock<Device> = std::sync::OnceLock::new();
        let open = || {
            let device = Device::new_cuda_with_stream(0).unwrap();
            if let Device::Cuda(card) = &device {
                // SAFETY: all of the tests work on the one stream of this device.
                unsafe { card.disable_event_tracking() };
            }
            device
        };
        return CARD.get_or_init(open).clone();
    }
    Device::Cpu
}

/// Values in [-1, 1) away from 0, where the slopes of clipped activations jump.
pub fn random(shape: &[usize], key: u64) -> Tensor {
    let r = Random::new(key, stream("check"));
    let values = (0..shape.iter().product::<usize>()).map(|i| {
        let v = 2.0 * r.f64(i as u64) - 1.0;
        v + 0.02f64.copysign(v)
    });
    Tensor::from_vec(values.collect::<Vec<f64>>(), shape, &device()).unwrap()
}

pub fn at(batch: usize, dtype: DType) -> At {
    let on = match device() {
        Device::Cpu => On::Cpu { threads: crate::kernels::cpu::threads() },
        _ => On::Cuda { capability: super::HOPPER },
    };
    At { batch, dtype, on }
}

/// A layer, or a loss, with parameters drawn at random (zeros and ones would hide mistakes).
pub struct Subject {
    pub store: Store,
    pub ids: Vec<u64>,
}

impl Subject {
    pub fn new(declared: Declared, dtype: DType, batch: usize) -> Self {
        let store = Store::new(declared.layout().unwrap(), 7, dtype, &device()).unwrap();
        if store.layout.params.len > 0 {
            let noise = random(&[store.layout.params.len], 11).affine(0.5, 0.1).unwrap();
            round_into(&noise, &store.master).unwrap();
            store.round().unwrap();
        }
        Self { store, ids: (0..batch as u64).map(|i| i * 31 + 5).collect() }
    }

    pub fn pass(&self, mode: Mode) -> Pass<'_> {
        Pass {
            store: &self.store,
            mode,
            seed: 3,
            epoch: 2,
            ids: &self.ids,
            lengths: None,
            staged: None,
            scale: 1.0,
            along: Along::default(),
        }
    }
}

pub fn flat(t: &Tensor) -> Vec<f64> {
    if t.elem_count() == 0 {
        return Vec::new(); // a card refuses to copy nothing
    }
    t.to_dtype(DType::F64).unwrap().flatten_all().unwrap().to_vec1().unwrap()
}

/// Largest difference relative to the largest value.
pub fn distance(a: &[f64], b: &[f64]) -> f64 {
    assert_eq!(a.len(), b.len());
    let scale = b.iter().fold(1e-9f64, |m, v| m.max(v.abs()));
    a.iter().zip(b).map(|(a, b)| (a - b).abs()).fold(0.0, f64::max) / scale
}

/// A variable of the oracle, which is candle's autograd in f64 on the CPU wherever the bodies run.
pub fn leaf(t: &Tensor) -> Var {
    Var::from_tensor(&t.to_device(&Device::Cpu).unwrap().to_dtype(DType::F64).unwrap()).unwrap()
}

/// Shifts one value of a contiguous buffer.
fn nudge(buffer: &Tensor, at: usize, by: f64) {
    let mut values = flat(buffer);
    values[at] += by;
    let moved = Tensor::from_vec(values, buffer.elem_count(), buffer.device()).unwrap();
    round_into(&moved, &buffer.flatten_all().unwrap()).unwrap();
}

/// Up to 24 positions of a buffer, spread over it.
fn probes(len: usize) -> Vec<usize> {
    let n = len.min(24);
    (0..n).map(|i| i * len / n + (i * 7) % (len / n)).collect()
}

/// Slopes of `f` along some values of a buffer, by central differences.
pub fn differences(buffer: &Tensor, f: &dyn Fn() -> f64) -> Vec<(usize, f64)> {
    const H: f64 = 1e-5;
    let slope = |i: usize| {
        nudge(buffer, i, H);
        let up = f();
        nudge(buffer, i, -2.0 * H);
        let down = f();
        nudge(buffer, i, H);
        (i, (up - down) / (2.0 * H))
    };
    probes(buffer.elem_count()).into_iter().map(slope).collect()
}

/// Holds gradients against such slopes.
pub fn assert_slopes(what: &str, found: &Tensor, wanted: Vec<(usize, f64)>) {
    let found = flat(found);
    let scale = found.iter().fold(1e-3f64, |m, v| m.max(v.abs()));
    for (i, slope) in wanted {
        assert!(
            (found[i] - slope).abs() <= 2e-6 * scale,
            "{what}: gradient {i} is {} and the difference quotient {slope} (largest {scale})",
            found[i]
        );
    }
}

/// Gradients of the input (where it is of f64) and of every parameter against differences in f64.
pub fn differences_agree(build: &dyn Fn(&mut Declared) -> Box<dyn Layer>, x: &Tensor) {
    let mut declared = Declared::default();
    let layer = build(&mut declared);
    let subject = Subject::new(declared, DType::F64, x.dim(0).unwrap());
    let pass = subject.pass(Mode::Train);
    let (y, saved) = layer.forward(x, &pass).unwrap();
    let expected: Vec<usize> = [&[x.dim(0).unwrap()], layer.output().as_slice()].concat();
    assert_eq!(y.dims(), expected, "{} says another shape than it makes", layer.name());
    let dy = random(y.dims(), 13);
    let smooth = x.dtype() == DType::F64;
    let dx = layer.backward(saved, dy.copy().unwrap(), &pass, smooth).unwrap();
    // Statistics must not move while the same forward pass is asked again and again.
    let again = subject.pass(Mode::Again);
    let value =
        || flat(&layer.forward(x, &again).unwrap().0).iter().zip(flat(&dy)).map(|(y, d)| y * d).sum::<f64>();
    if subject.store.master.elem_count() > 0 {
        assert_slopes("parameters", &subject.store.grads, differences(&subject.store.master, &value));
    }
    if let Some(dx) = dx.filter(|_| smooth) {
        assert_slopes("input", &dx, differences(x, &value));
        let (saved, onto) = (layer.forward(x, &again).unwrap().1, random(x.dims(), 14));
        let both = layer.backward_onto(saved, dy.copy().unwrap(), &again, &onto).unwrap().unwrap();
        assert!(distance(&flat(&both), &flat(&(dx + onto).unwrap())) < 1e-9, "{}: added", layer.name());
    }
}

/// The fast body, in f32, against candle's autograd on the reference: output, input gradient and the
/// flat parameter gradient. `reference` gets the input and the parameters in the order of declaration.
pub fn autograd_agrees(
    build: &dyn Fn(&mut Declared) -> Box<dyn Layer>,
    x: &Tensor,
    reference: &dyn Fn(&Tensor, &[Tensor]) -> candle_core::Result<Tensor>,
) {
    let mut declared = Declared::default();
    let layer = build(&mut declared);
    let subject = Subject::new(declared, DType::F32, x.dim(0).unwrap());
    let pass = subject.pass(Mode::Train);
    let smooth = x.dtype() == DType::F64;
    let x = if smooth { x.to_dtype(DType::F32).unwrap() } else { x.clone() };
    let (y, saved) = layer.forward(&x, &pass).unwrap();
    let dy = random(y.dims(), 17).to_dtype(DType::F32).unwrap();
    let dx = layer.backward(saved, dy.copy().unwrap(), &pass, smooth).unwrap();

    let params: Vec<Var> = subject.store.weights().iter().map(leaf).collect();
    let input = smooth.then(|| leaf(&x));
    let views: Vec<Tensor> = params.iter().map(|v| v.as_tensor().clone()).collect();
    let from = input.as_ref().map_or_else(|| x.to_device(&Device::Cpu).unwrap(), |v| v.as_tensor().clone());
    let wanted = reference(&from, &views).unwrap();
    assert!(distance(&flat(&y), &flat(&wanted)) < 1e-5, "{}: output", layer.name());
    let grads = (&wanted * leaf(&dy).as_tensor()).unwrap().sum_all().unwrap().backward().unwrap();
    if let Some(input) = &input {
        assert!(
            distance(&flat(&dx.unwrap()), &flat(grads.get(input).unwrap())) < 2e-5,
            "{}: input gradient",
            layer.name()
        );
    }
    for (i, (ours, var)) in subject.store.grad_views().iter().zip(&params).enumerate() {
        let name = &subject.store.layout.params.spec(i).name;
        // A gradient of one value may be terms of size 1 that cancel each other: what is left of them keeps their
        // rounding, and only that is measured by it.
        let wanted = flat(grads.get(var).unwrap());
        let cancelled = wanted.iter().fold(0f64, |m, v| m.max(v.abs())) / 0.1;
        let far = distance(&flat(ours), &wanted) * cancelled.min(1.0);
        assert!(far < 2e-5, "{name}: parameter gradient");
    }
}

/// Identity and size of the memory behind a tensor.
fn memory(t: &Tensor) -> (usize, u64) {
    let (storage, _) = t.storage_and_layout();
    match &*storage {
        Storage::Cpu(cpu) => {
            macro_rules! of {
                ($($variant:ident),*) => {
                    match cpu {
                        $(candle_core::CpuStorage::$variant(v) => (v.as_ptr() as usize, size_of_val(v.as_slice()) as u64),)*
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
                        $(CudaStorageSlice::$variant(v) => (v.device_ptr(v.stream()).0 as usize, v.num_bytes() as u64),)*
                        _ => panic!("an unexpected type"),
                    }
                };
            }
            of!(F32, F64, BF16, F16, U8, U32, I64)
        }
        _ => panic!("a device without tests"),
    }
}

/// `cost` is exactly what `forward` holds, at three sizes and in three types.
pub fn cost_is_exact(build: &dyn Fn(&mut Declared) -> Box<dyn Layer>, input: &dyn Fn(usize) -> Tensor) {
    for (batch, dtype) in
        [(1, DType::F32), (3, DType::F32), (8, DType::F32), (3, DType::BF16), (3, DType::F64)]
    {
        let mut declared = Declared::default();
        let layer = build(&mut declared);
        let subject = Subject::new(declared, dtype, batch);
        let x = input(batch);
        let smooth = x.dtype() == DType::F64;
        let x = if smooth { x.to_dtype(dtype).unwrap().copy().unwrap() } else { x };
        let cost_at = at(batch, dtype);
        let cost = layer.cost(cost_at);
        let (y, saved) = layer.forward(&x, &subject.pass(Mode::Train)).unwrap();
        let ((x_at, x_bytes), (y_at, y_bytes)) = (memory(&x), memory(&y));
        let (name, mut seen, mut extra) = (layer.name(), Vec::new(), 0);
        let (mut kept_x, mut kept_y) = (false, false);
        for (at, bytes) in saved.0.iter().map(memory) {
            kept_x |= at == x_at;
            kept_y |= at == y_at && at != x_at;
            if at != x_at && at != y_at && !seen.contains(&at) {
                seen.push(at);
                extra += bytes;
            }
        }
        assert_eq!(
            cost.saved, extra,
            "{name}: bytes saved beside input and output, batch {batch}, {dtype:?}"
        );
        assert_eq!(cost.keeps_input, kept_x, "{name}: keeps its input");
        if cost.keeps_input {
            assert_eq!(memory(&saved.0[0]).0, x_at, "{name}: the input is the first it saves");
        }
        let again = layer.again(&saved, &subject.pass(Mode::Train)).unwrap();
        assert_eq!(
            again.is_some(),
            layer.remakes(cost_at.on) != Remakes::Never,
            "{name}: makes its output again"
        );
        if let Some(again) = again {
            // What a card makes within a product is made again from rounded values.
            let rounded = layer.remakes(cost_at.on) == Remakes::Alone && dtype.size_in_bytes() == 2;
            let bound = if rounded { 1e-2 } else { 0.0 };
            assert!(distance(&flat(&again), &flat(&y)) <= bound, "{name}: the output made again");
        }
        assert_eq!(cost.keeps_output, kept_y, "{name}: keeps its output");
        assert_eq!(cost.view, x_at == y_at, "{name}: output is a view");
        assert_eq!(cost.output, if cost.view { 0 } else { y_bytes }, "{name}: output bytes");
        if smooth && !cost.view {
            assert_eq!(cost.input, x_bytes, "{name}: bytes of the input's gradient");
        }
        cost_grows_with_the_batch(&*layer, dtype);
    }
}

/// The plan counts whole micro-batches, and the last one of an epoch is shorter: it must not take more.
fn cost_grows_with_the_batch(layer: &dyn Layer, dtype: DType) {
    // Lists of what threads share may be longer where a batch divides worse.
    const LISTS: u64 = 4096;
    let cpu = [1, 2, 3, 4, 7, 16].map(|threads| On::Cpu { threads });
    let gpu = [(8, 0), HOPPER].map(|capability| On::Cuda { capability });
    for on in cpu.into_iter().chain(gpu) {
        let mut most = [0, 0];
        for batch in 1..=40 {
            let cost = layer.cost(At { batch, dtype, on });
            let held = cost.output + cost.saved;
            for (most, (phase, bytes)) in most
                .iter_mut()
                .zip([("forward", held + cost.forward), ("backward", held + cost.input + cost.backward)])
            {
                let name = layer.name();
                assert!(
                    bytes + LISTS >= *most,
                    "{name}: {phase}: {bytes} bytes for {batch} samples, {most} for fewer; {dtype:?}, {on:?}"
                );
                *most = bytes.max(*most);
            }
        }
    }
}

/// A loss's gradients against differences in f64.
pub fn loss_differences_agree(build: &dyn Fn(&mut Declared) -> Box<dyn Loss>, x: &Tensor, targets: &Tensor) {
    let mut declared = Declared::default();
    let loss = build(&mut declared);
    let subject = Subject::new(declared, DType::F64, x.dim(0).unwrap());
    let pass = Pass { scale: 0.37, ..subject.pass(Mode::Train) };
    let (tally, dx) = loss.learn(x, targets, &pass).unwrap();
    let read = |counted: Counted| counted.read().unwrap();
    let judge = || read(loss.judge(x, targets, &pass).unwrap());
    assert_eq!(read(tally), judge(), "learning and judging count the same");
    let value = || 0.37 * judge().loss;
    assert_slopes("input", &dx, differences(x, &value));
    if subject.store.master.elem_count() > 0 {
        assert_slopes("parameters", &subject.store.grads, differences(&subject.store.master, &value));
    }
}

/// How far bf16 may be from f64, relative to the largest value: five roundings to its eight bits.
const BF16_BOUND: f64 = 2e-2;

/// A subject whose weights are the same, to the bit, in every type: numbers that bf16 has.
fn rounded(declared: Declared, dtype: DType, batch: usize) -> Subject {
    let subject = Subject::new(declared, dtype, batch);
    if subject.store.layout.params.len > 0 {
        round_into(&as_bf16(&subject.store.master, DType::F64), &subject.store.master).unwrap();
        subject.store.round().unwrap();
    }
    subject
}

/// The nearest numbers that bf16 has, in `dtype`.
fn as_bf16(t: &Tensor, dtype: DType) -> Tensor {
    let narrow = t.to_dtype(DType::F32).unwrap().to_dtype(DType::BF16).unwrap();
    narrow.to_dtype(dtype).unwrap()
}

fn assert_follows(what: &str, narrow: Vec<(String, Vec<f64>)>, wide: Vec<(String, Vec<f64>)>) {
    for ((name, narrow), (_, wide)) in narrow.iter().zip(&wide) {
        let far = distance(narrow, wide);
        assert!(far < BF16_BOUND, "{what}: {name} in bf16 is {far} from f64");
    }
}

fn gradients(subject: &Subject) -> impl Iterator<Item = (String, Vec<f64>)> + '_ {
    let name = |i: usize| subject.store.layout.params.spec(i).name.clone();
    subject.store.grad_views().iter().enumerate().map(move |(i, grad)| (name(i), flat(grad)))
}

/// A layer in bf16 against itself in f64, with the same weights and inputs: output and all gradients.
pub fn bf16_follows(build: &dyn Fn(&mut Declared) -> Box<dyn Layer>, x: &Tensor) {
    let run = |dtype: DType| {
        let mut declared = Declared::default();
        let layer = build(&mut declared);
        let subject = rounded(declared, dtype, x.dim(0).unwrap());
        let pass = subject.pass(Mode::Train);
        let smooth = x.dtype() == DType::F64;
        let x = if smooth { as_bf16(x, dtype) } else { x.clone() };
        let (y, saved) = layer.forward(&x, &pass).unwrap();
        let dy = as_bf16(&random(y.dims(), 19), dtype);
        let dx = layer.backward(saved, dy, &pass, smooth).unwrap();
        let mut found = vec![("output".to_string(), flat(&y))];
        found.extend(dx.map(|dx| ("input gradient".into(), flat(&dx))));
        found.extend(gradients(&subject));
        found
    };
    assert_follows("layer", run(DType::BF16), run(DType::F64));
}

/// A loss in bf16 against itself in f64, with the same weights and inputs: its value and all gradients.
pub fn loss_bf16_follows(build: &dyn Fn(&mut Declared) -> Box<dyn Loss>, x: &Tensor, targets: &Tensor) {
    let run = |dtype: DType| {
        let mut declared = Declared::default();
        let loss = build(&mut declared);
        let subject = rounded(declared, dtype, x.dim(0).unwrap());
        let (tally, dx) = loss.learn(&as_bf16(x, dtype), targets, &subject.pass(Mode::Train)).unwrap();
        let mut found = vec![
            ("loss".to_string(), vec![tally.read().unwrap().loss]),
            ("input gradient".into(), flat(&dx)),
        ];
        found.extend(gradients(&subject));
        found
    };
    assert_follows("loss", run(DType::BF16), run(DType::F64));
}
