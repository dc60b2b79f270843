//! What other tools call the keys and tables of a job. Names are separated by spaces.

const BETAS: &str = "as `betas = [beta1, beta2]`";
const STRATIFIED: &str = "as `split = \"stratified\"`";
const RECOMPUTE: &str = "which contains `recompute` by default: it is used when memory requires it";
const FINAL_LR: &str = "the last learning rate divided by `optimizer.lr`";

/// (key, note, names): the names of Keras, Lightning, scikit-learn, pandas, Hugging Face, nanoGPT, axolotl, Unsloth
/// and others, separated by spaces.
pub(super) const KEYS: &[(&str, &str, &str)] = &[
    ("seed", "", "seed random_state random_seed manual_seed data_seed"),
    ("optimizer.lr", "", "lr learning_rate base_lr max_lr peak_lr learning_rate_init"),
    ("optimizer.weight_decay", "", "weight_decay wd"),
    ("optimizer.betas", BETAS, "beta1 beta2 beta_1 beta_2 adam_beta1 adam_beta2"),
    ("optimizer.eps", "", "epsilon adam_epsilon"),
    ("optimizer.kind", "", "optimizer_type optimizer_name solver"),
    ("schedule.kind", "", "lr_scheduler_type lr_schedule"),
    ("schedule.warmup_steps", "", "warmup warmup_iters num_warmup_steps lr_warmup_steps"),
    (
        "schedule.warmup_fraction",
        "for `kind = \"onecycle\"`; others take `warmup_steps`",
        "warmup_ratio warmup_proportion pct_start",
    ),
    ("schedule.final_lr_ratio", FINAL_LR, "min_lr eta_min end_lr final_lr min_lr_ratio"),
    ("schedule.every_steps", "", "step_size"),
    (
        "train.steps",
        "",
        "max_steps max_iters num_steps num_train_steps total_steps train_steps num_iterations",
    ),
    ("train.epochs", "", "epochs max_epochs num_epochs num_train_epochs n_epochs nb_epoch"),
    (
        "train.batch_size",
        "",
        "batch_size batch bs micro_batch_size per_device_train_batch_size train_batch_size",
    ),
    (
        "train.accumulation_steps",
        "",
        "gradient_accumulation_steps accumulate_grad_batches grad_accum grad_accum_steps",
    ),
    (
        "train.clip_norm",
        "",
        "gradient_clip_val max_grad_norm grad_clip clipnorm clip_grad_norm grad_norm_clip",
    ),
    ("train.freeze", "", "freeze_layers frozen"),
    ("train.freeze", "as `freeze = [\"*\", \"!pattern\"]`", "unfrozen_parameters"),
    ("train.groups", "", "param_groups"),
    ("train.groups.lr_scale", "a factor of `optimizer.lr`", "lr learning_rate lr_mult lr_multiplier"),
    ("train.groups.params", "", "modules param_names"),
    ("train.loss", "", "loss loss_function loss_fn criterion objective"),
    ("train.class_weights", "", "class_weight class_weights pos_weight"),
    ("train.label_smoothing", "", "label_smoothing_factor"),
    ("train.ema", "", "ema_decay use_ema"),
    (
        "train.init",
        "",
        "pretrained pretrained_weights weights init_from base_model model_name_or_path checkpoint_path",
    ),
    ("data.dtype", "", "token_dtype"),
    ("train.precision", "", "dtype mixed_precision amp torch_dtype"),
    ("train.precision", "as `precision = \"f16\"`", "fp16"),
    ("train.precision", "as `precision = \"bf16\"`", "bf16"),
    ("model.layers", "", "layers"),
    ("model.stages", "", "layers filters channels conv_layers"),
    ("model.layers", "", "n_layer n_layers num_layers num_hidden_layers depth"),
    ("model.heads", "", "n_head n_heads num_heads num_attention_heads nhead"),
    ("model.kv_heads", "", "num_key_value_heads n_kv_heads num_kv_heads"),
    ("model.width", "", "n_embd hidden_size d_model embed_dim emb_dim width_mult"),
    (
        "model.hidden",
        "a list of widths",
        "layers hidden_layers hidden_layer_sizes hidden_sizes hidden_size hidden_dims hidden_dim units",
    ),
    ("model.hidden", "", "intermediate_size ffn_dim dim_feedforward d_ff"),
    (
        "model.context",
        "",
        "block_size seq_len sequence_len sequence_length context_length n_ctx n_positions cutoff_len \
         max_length max_len max_seq_length max_seq_len max_position_embeddings",
    ),
    ("model.activation", "", "act hidden_act activation_function act_fn"),
    ("model.dropout", "", "dropout_rate drop_rate dropout_p hidden_dropout_prob resid_pdrop"),
    ("model.tie", "", "tie_word_embeddings tie_weights tie_embeddings"),
    ("model.norm_eps", "", "rms_norm_eps layer_norm_eps"),
    ("model.patch", "", "patch_size"),
    ("model.ratio", "", "mlp_ratio"),
    (
        "data.train",
        "",
        "dataset datasets path file data_path data_file data_files data_dir dataset_path train_data \
         train_file train_path train_dir train_dataset filename files root",
    ),
    ("data.train_images", "", "dataset path file data_path data_dir train train_data root"),
    (
        "data.valid",
        "",
        "validation val val_data validation_data valid_data val_path val_file val_dir validation_file \
         eval_dataset eval_file dev",
    ),
    ("data.valid_images", "", "validation val valid validation_data"),
    ("data.test", "", "test_data test_file test_path test_dir test_dataset"),
    ("data.test_images", "", "test test_data"),
    (
        "data.valid_fraction",
        "",
        "valid_split validation_split val_split val_set_size val_size val_fraction validation_fraction \
         eval_size",
    ),
    ("data.test_fraction", "", "test_split test_size"),
    ("data.split", STRATIFIED, "stratify"),
    ("data.group", "", "groups group_column group_by"),
    ("data.fold", "as `fold = \"1/5\"`", "n_splits folds kfold"),
    (
        "data.target",
        "",
        "target label labels label_column label_col target_column target_col target_name y y_col response",
    ),
    ("data.label", "", "target labels label_column label_col label_field y"),
    ("data.label_column", "", "target label labels label_col y_col y"),
    ("data.path_column", "", "image_column path_col image_path x_col filename_column image_col"),
    ("data.columns", "", "features feature_columns feature_cols usecols input_columns inputs x_cols"),
    ("data.ignore", "", "drop drop_columns drop_cols exclude ignore_columns remove_columns index_col"),
    ("data.weight", "", "sample_weight sample_weights weight_column weights weight_col"),
    ("data.categorical", "", "categorical_columns categorical_features cat_features cat_cols"),
    ("data.numeric", "", "numeric_columns numerical numerical_columns num_cols"),
    ("data.delimiter", "", "separator sep delim field_delimiter"),
    ("data.separator", "", "eos eos_token delimiter sep"),
    ("data.missing", "", "na_values null_values nan_values missing_values"),
    ("data.on_missing", "", "impute imputer imputation fillna missing_strategy"),
    ("data.skip_lines", "", "skiprows skip_rows skip_header"),
    ("data.quote", "", "quotechar quote_char"),
    ("data.dates", "as `dates = \"day_first\"`", "dayfirst day_first"),
    ("data.standardise", "", "standardize normalize normalise normalization scale scaler scaling"),
    ("data.normalise", "", "normalize normalization standardize standardise rescale"),
    ("data.on_bad_record", "", "on_bad_lines on_error on_bad_row error_bad_lines"),
    ("data.image_size", "", "img_size imgsz input_size target_size resize image_shape"),
    ("data.channels", "", "num_channels in_channels color_mode in_chans"),
    ("data.augment", "", "augmentation augmentations transforms transform data_augmentation"),
    (
        "data.tokens",
        "\"characters\", \"bytes\" or the path of a `tokenizer.json`",
        "tokenizer tokenizer_path tokenizer_name tokenizer_type",
    ),
    ("data.tokenizer", "", "tokens tokenizer_path tokenizer_name"),
    ("data.vocab", "", "vocab_size"),
    ("data.field", "", "text_column text_field text_key dataset_text_field"),
    ("data.messages", "", "conversations field_messages messages_field"),
    ("data.chat", "", "chat_format conversation"),
    ("data.template", "", "chat_template prompt_template conversation_template"),
    ("data.loss", "as `loss = \"all\"`", "train_on_inputs"),
    ("data.pack", "", "packing sample_packing"),
    ("data.workers", "", "num_workers dataloader_num_workers n_workers"),
    ("data.prefetch", "", "prefetch_factor dataloader_prefetch_factor"),
    ("data.shuffle_buffer", "", "shuffle_buffer_size buffer_size shuffle_size"),
    (
        "data.augment.horizontal_flip",
        "",
        "flip hflip fliplr flip_lr random_horizontal_flip randomhorizontalflip",
    ),
    ("data.augment.vertical_flip", "", "vflip flipud flip_ud random_vertical_flip randomverticalflip"),
    ("data.augment.rotation", "", "rotate degrees rotation_range random_rotation randomrotation"),
    ("data.augment.translate", "", "width_shift_range height_shift_range shift"),
    ("data.augment.scale", "", "zoom zoom_range"),
    ("data.augment.shear", "", "shear_range"),
    ("data.augment.brightness", "", "brightness_range"),
    ("data.augment.random_resized_crop", "", "random_crop resized_crop randomresizedcrop"),
    ("data.augment.erasing", "", "random_erasing randomerasing cutout reprob"),
    ("data.augment.randaugment", "", "rand_augment randaug"),
    ("data.augment.mixup", "", "mixup_alpha"),
    ("data.augment.cutmix", "", "cutmix_alpha"),
    ("eval.metrics", "", "scoring compute_metrics"),
    ("eval.batch_size", "", "eval_batch_size per_device_eval_batch_size val_batch_size"),
    ("eval.every_steps", "", "eval_steps eval_interval eval_every val_check_interval eval_freq"),
    ("eval.every_epochs", "", "check_val_every_n_epoch eval_epochs"),
    (
        "checkpoint.every_steps",
        "",
        "save_steps save_interval save_every save_freq checkpoint_interval every_n_train_steps \
         checkpoint_every",
    ),
    ("checkpoint.every_epochs", "", "save_epochs every_n_epochs"),
    ("checkpoint.keep", "", "save_top_k save_total_limit max_to_keep keep_last"),
    ("checkpoint.best", "", "monitor metric_for_best_model save_best save_best_only"),
    ("stop.metric", "", "monitor early_stopping_metric"),
    (
        "stop.patience",
        "",
        "early_stopping early_stopping_patience early_stopping_rounds early_stop patience n_iter_no_change",
    ),
    ("stop.min_delta", "", "early_stopping_threshold early_stopping_min_delta tol"),
    ("stop.max_minutes", "", "max_time time_limit"),
    ("log.every_steps", "", "logging_steps log_every_n_steps log_interval log_every logging_interval"),
    ("log.tensorboard", "", "tensorboard_dir use_tensorboard"),
    ("log.mlflow", "", "mlflow_uri mlflow_tracking_uri tracking_uri"),
    (
        "memory.on_oom",
        RECOMPUTE,
        "gradient_checkpointing use_gradient_checkpointing activation_checkpointing recompute",
    ),
    ("memory.vram", "", "gpu_memory max_memory gpu_memory_utilization"),
];

/// (table, names) of a job.
pub(super) const TABLES: &[(&str, &str)] = &[
    ("data", "dataset datasets data_module datamodule"),
    ("model", "network architecture net"),
    ("train", "training trainer train_config training_args training_arguments fit"),
    ("optimizer", "optim optimiser"),
    ("schedule", "scheduler lr_scheduler lr_schedule"),
    ("eval", "evaluation validation validate metrics"),
    ("checkpoint", "checkpointing model_checkpoint save saving"),
    ("stop", "early_stopping earlystopping early_stop"),
    ("log", "logging logger loggers"),
    ("memory", "hardware resources"),
];

/// (why, names) of what a job does not state.
pub(super) const NOT_STATED: &[(&str, &str)] = &[
    ("the classes are found in the data", "num_classes n_classes num_labels nc out_features output_size"),
    (
        "the vocabulary is that of the tokenizer; `data.vocab` with `kind = \"tokens\"`",
        "vocab_size vocabulary_size n_vocab",
    ),
    ("the shape of a sample is found in the data", "input_shape input_dim in_features n_features"),
    (
        "`--device` on the command line chooses the one device of a run",
        "device devices accelerator gpu gpus num_gpus n_gpus n_gpu use_cuda cuda",
    ),
    (
        "`--run-dir` on the command line chooses the folder of a run",
        "output_dir out_dir save_dir log_dir logdir logging_dir default_root_dir run_dir run_name_dir \
         checkpoint_dir",
    ),
    (
        "`trainer fit --resume` resumes a run",
        "resume resume_from_checkpoint ckpt_path auto_resume_from_checkpoints",
    ),
    (
        "runs are logged to TensorBoard by `log.tensorboard` and to MLflow by `log.mlflow`",
        "wandb wandb_project use_wandb report_to comet neptune",
    ),
    (
        "the best checkpoint is always kept, and `trainer eval` and `trainer predict` use it",
        "load_best_model_at_end restore_best_weights",
    ),
    ("`-q` and `-v` on the command line choose it", "verbose verbosity disable_tqdm progress_bar"),
    (
        "adapters are not supported; `train.freeze` trains only some of the parameters",
        "adapter lora lora_r lora_alpha lora_dropout lora_target_modules use_lora peft load_in_4bit \
         load_in_8bit",
    ),
];
